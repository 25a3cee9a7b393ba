"""The slots of a run: sequences side by side in one cache, fed, decoded and compacted together.

The sequences being served always stand in the first slots: when one ends, the last one takes
over its slot. So no forward computes anything for an empty slot.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpolicy.cache import Cache
from kvpolicy.clock import Clock
from kvpolicy.compactor import Compactor
from kvpolicy.memory import Memory
from kvpolicy.observer import Observer
from kvpolicy.registers import RegisterFile
from kvpolicy.sequence import LiveSequence
from kvpolicy.step import Step

if TYPE_CHECKING:
    from kvpolicy.engine import Engine

# Draws the next token of each sequence from its logits, and gives it to the sequence.
Take = Callable[[Sequence[LiveSequence], Tensor], None]


class Slots:
    """Sequences in their slots, with the cache and what policies keep of them.

    Attributes:
        active: The sequences being served, in the order of their slots.
        cache: Their rows.
        clock: Seconds that policies took.
        compactor: Brings them within their budgets.
    """

    def __init__(self, engine: "Engine", num_slots: int, longest: int) -> None:
        """Allocate everything for sequences of at most ``longest`` tokens."""
        self.active: list[LiveSequence] = []
        self.clock = Clock()
        self._plan, self._stacks, self._seam = engine.plan, engine.stacks, engine.seam
        self._tokenizer, self._chunk = engine.tokenizer, engine.chunk
        self._asking = engine.asking
        self._departed: list[LiveSequence] = []
        pairs = list(zip(engine.stacks, engine.plan.layers, strict=True))
        slabs = [stack.slab(layer.capacity(longest)) for stack, layer in pairs]
        self.cache = Cache(engine.seam.layer_shapes(), slabs, num_slots)
        policies = [policy for stack in engine.stacks for policy in stack.policies]
        self._registers = RegisterFile(policies, num_slots, engine.seam.model.device)
        self.cache.slot_tensors += self._registers.all
        self._observer = Observer(
            engine.plan.layers,
            engine.stacks,
            self._registers,
            engine.tokenizer,
            self.clock,
            engine.asking,
        )
        self._observer.attach(
            self.cache, engine.seam.hidden_size, engine.seam.model.dtype, engine.seam.last_device
        )
        self.compactor = Compactor(
            self.cache,
            engine.plan.layers,
            engine.stacks,
            self._observer,
            self.clock,
            engine.asking,
        )

    @property
    def num_free(self) -> int:
        """Slots that nobody uses."""
        return self.cache.num_slots - len(self.active)

    def prefill(self, group: Sequence[LiveSequence], take: Take) -> None:
        """Bring the prompts of a group into free slots, in chunks that their slabs can take."""
        # In order of length, so that those still being fed always stand in the last slots.
        group = sorted(group, key=lambda served: len(served.prompt))
        self.active.extend(group)
        self._pad(group)
        fed = 0
        while feeding := [one for one in group if len(one.prompt) > fed and not one.error]:
            fed += self._feed(feeding, fed, take)
            self._drop_failed(feeding)

    def decode(self, take: Take) -> None:
        """Give every sequence its next token."""
        with self._asking.about(self.active):
            self._decode(take)

    def _decode(self, take: Take) -> None:
        token_ids = torch.tensor([served.tokens[-1] for served in self.active])
        step = Step(self.cache, 0, [1] * len(self.active))
        with self._seam.steered(
            self._stacks,
            token_ids,
            self.clock,
            tokenizer=self._tokenizer,
            registers=self._registers.of_slots(0, len(self.active)),
            memory=Memory([served.memory for served in self.active]),
        ):
            logits, states = self._forward(token_ids[:, None], step)
        take(self.active, logits)
        self._observer.note(self.active, None if states is None else states[:, -1])
        self.compactor.compact(self.active, 0, len(self.active))

    def release(self) -> list[LiveSequence]:
        """Take finished sequences out of their slots; the last slots move into the gaps."""
        finished, self._departed = self._departed, []
        for slot in reversed(range(len(self.active))):
            if self.active[slot].finish_reason is None:
                continue
            served, last = self.active[slot], len(self.active) - 1
            self.compactor.note_peak(served, slot)
            finished.append(served)
            if slot == last:
                self.cache.clear(slot)
            else:
                self.cache.move(last, slot)
                self.active[slot] = self.active[last]
            self.active.pop()
        return finished

    def _drop_failed(self, feeding: Sequence[LiveSequence]) -> None:
        """Take out the sequences for which a policy has failed while they were being fed.

        They stand among the last slots. Those behind them move up one by one, so that they
        stay in order of length.
        """
        for served in [one for one in feeding if one.error is not None]:
            slot = self.active.index(served)
            self.compactor.note_peak(served, slot)
            self.cache.clear(slot)
            for behind in range(slot + 1, len(self.active)):
                self.cache.move(behind, behind - 1)
            del self.active[slot]
            self._departed.append(served)

    def _feed(self, feeding: Sequence[LiveSequence], fed: int, take: Take) -> int:
        """Feed the next chunk of each prompt; return how long the longest chunk was."""
        last = len(self.active)
        first = last - len(feeding)
        width = min(self._chunk, self.cache.num_free_rows(first, last))
        chunks = [served.prompt[fed : fed + width] for served in feeding]
        step = Step(self.cache, first, [len(chunk) for chunk in chunks])
        token_ids = torch.zeros(len(chunks), step.width, dtype=torch.int64)
        for row, chunk in enumerate(chunks):
            token_ids[row, step.width - len(chunk) :] = torch.tensor(chunk)
        logits, states = self._forward(token_ids, step)
        complete = [row for row, served in enumerate(feeding) if len(served.prompt) <= fed + width]
        if complete:
            take([feeding[row] for row in complete], logits[complete])
        self._observer.show_prompt(feeding, first, states)
        self.compactor.compact(self.active, first, last)
        return step.width

    def _forward(self, token_ids: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        return self._seam.forward(token_ids, step, wants_states=self._observer.wants_states)

    def _pad(self, group: Sequence[LiveSequence]) -> None:
        """Take rows away for the pads of a batch, in plans that study what they do."""
        if self._plan.padding != "stored":
            return
        first = len(self.active) - len(group)
        for slot, served in enumerate(group, start=first):
            num_pads = len(group[-1].prompt) - len(served.prompt)
            spare = [layer.num_spare_rows for layer in self._plan.layers]
            self.cache.num_pads[:, slot] = [min(num_pads, most) for most in spare]
