"""The slots of a run: sequences side by side in one cache, fed, decoded and compacted together.

The sequences being served always stand in the first slots: when one ends, the last one takes
over its slot. So no forward computes anything for an empty slot.

What is done between the forwards stands here; who runs them is left open. The engine runs
each as it comes, `PolicyCache` lets the last one be run by whoever called the model.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpolicy.cache.layout import StepLayout
from kvpolicy.cache.slab import Cache
from kvpolicy.engine.compactor import Compactor
from kvpolicy.engine.feed import Feed, Feeds
from kvpolicy.engine.observer import Observer
from kvpolicy.engine.sequence import LiveSequence
from kvpolicy.hooks.timing import Clock
from kvpolicy.state import Memory, RegisterFile

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine

# Takes the logits after the newest token of each sequence, ``[B, V]``: draws the next one.
OnTokens = Callable[[Sequence[LiveSequence], Tensor], None]


class RunningBatch:
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
        self._plan, self._stacks, self._adapter = engine.plan, engine.stacks, engine.adapter
        self._tokenizer, self._chunk = engine.tokenizer, engine.chunk
        self._asking = engine.asking
        self._departed: list[LiveSequence] = []
        pairs = list(zip(engine.stacks, engine.plan.layers, strict=True))
        slabs = [stack.slab(layer.capacity(longest)) for stack, layer in pairs]
        self.cache = Cache(engine.adapter.layer_shapes(), slabs, num_slots)
        self.cache.rotate = engine.adapter.rotation()
        policies = [policy for stack in engine.stacks for policy in stack.policies]
        self._registers = RegisterFile(policies, num_slots, engine.adapter.model.device)
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
            self.cache,
            engine.adapter.hidden_size,
            engine.adapter.model.dtype,
            engine.adapter.last_device,
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

    @property
    def num_unfed(self) -> int:
        """Tokens of prompts that are not in yet."""
        return sum(self._num_left(slot) for slot in range(len(self.active)))

    @property
    def wants_states(self) -> bool:
        """Whether the hidden states of a forward are wanted."""
        return self._observer.wants_states

    def reserve(self, longest: int) -> None:
        """Make room for sequences of ``longest`` tokens; what is held stays."""
        pairs = zip(self._stacks, self._plan.layers, strict=True)
        self.cache.grow([stack.slab(layer.capacity(longest)) for stack, layer in pairs])

    def prefill(self, group: Sequence[LiveSequence], take: OnTokens) -> None:
        """Bring the prompts of a group into free slots, in chunks that their slabs can take."""
        self.admit(group)
        self._run(self.feeds(take))

    def decode(self, take: OnTokens) -> None:
        """Give every sequence its next token."""
        with self.clock.decoding(), self._asking.about(self.active):
            self._run(self.decode_feeds(take))

    def admit(self, group: Sequence[LiveSequence]) -> None:
        """Give the sequences of a group free slots."""
        # In order of length, so that those still being fed always stand in the last slots.
        group = sorted(group, key=lambda served: len(served.prompt))
        self.active.extend(group)
        self._pad(group)

    def feeds(self, take: OnTokens) -> Feeds:
        """Forwards that bring in what is left of the prompts, with compactions in between."""
        left = [self._num_left(slot) for slot in range(len(self.active))]
        # Slots are fed together as long as none has less left than the one before it.
        falls = [slot for slot, (one, next_) in enumerate(pairwise(left), 1) if next_ < one]
        num_dropped = 0
        for begin, end in pairwise([0, *falls, len(left)]):
            first, last = begin - num_dropped, end - num_dropped
            while first < last:
                if not self._num_left(first):
                    first += 1
                    continue
                yield from self._chunk_feeds(first, last, take)
                num_failed = self._drop_failed(first, last)
                last -= num_failed
                num_dropped += num_failed

    def decode_feeds(self, take: OnTokens) -> Feeds:
        """The one forward that gives every sequence its newest token."""
        token_ids = torch.tensor([served.tokens[-1] for served in self.active])
        step = StepLayout(self.cache, 0, [1] * len(self.active))
        with self._adapter.steered(
            self._stacks,
            token_ids,
            self.clock,
            tokenizer=self._tokenizer,
            registers=self._registers.of_slots(0, len(self.active)),
            memory=Memory([served.memory for served in self.active]),
        ):
            logits, states = yield Feed(token_ids[:, None], step)
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

    def _drop_failed(self, first: int, last: int) -> int:
        """Take out of the slots ``[first, last)`` those for which a policy has failed.

        Those behind them move up one by one, so that they stay in order.

        Returns:
            How many.
        """
        failed = [served for served in self.active[first:last] if served.error is not None]
        for served in failed:
            slot = self.active.index(served)
            self.compactor.note_peak(served, slot)
            self.cache.clear(slot)
            for behind in range(slot + 1, len(self.active)):
                self.cache.move(behind, behind - 1)
            del self.active[slot]
            self._departed.append(served)
        return len(failed)

    def _run(self, feeds: Feeds) -> None:
        """Run forwards as they come."""
        # A model has parameters, and what policies remember must not hold on to a graph.
        with closing(feeds), torch.no_grad():
            feed = next(feeds, None)
            while feed is not None:
                done = self._adapter.forward(
                    feed.token_ids, feed.step, wants_states=self.wants_states
                )
                try:
                    feed = feeds.send(done)
                except StopIteration:
                    return

    def _num_left(self, slot: int) -> int:
        return max(len(self.active[slot].prompt) - int(self.cache.seq_len[slot]), 0)

    def _chunk_feeds(self, first: int, last: int, take: OnTokens) -> Feeds:
        """The forward of the next chunk of each prompt in the slots ``[first, last)``."""
        feeding = self.active[first:last]
        for slot, served in enumerate(feeding, start=first):
            # What was generated before another turn may not all have been shown.
            self._observer.flush(served, slot)
        fed = self.cache.seq_len[first:last].tolist()
        width = min(self._chunk, self.cache.num_free_rows(first, last))
        chunks = [
            served.prompt[start : start + width] for served, start in zip(feeding, fed, strict=True)
        ]
        step = StepLayout(self.cache, first, [len(chunk) for chunk in chunks])
        token_ids = torch.zeros(len(chunks), step.width, dtype=torch.int64)
        for row, chunk in enumerate(chunks):
            token_ids[row, step.width - len(chunk) :] = torch.tensor(chunk)
        logits, states = yield Feed(token_ids, step)
        complete = [row for row in range(len(feeding)) if not self._num_left(first + row)]
        if complete:
            take([feeding[row] for row in complete], logits[complete])
        self._observer.show_prompt(feeding, first, states)
        self.compactor.compact(self.active, first, last)

    def _pad(self, group: Sequence[LiveSequence]) -> None:
        """Take rows away for the pads of a batch, in plans that study what they do."""
        if self._plan.padding != "stored":
            return
        first = len(self.active) - len(group)
        for slot, served in enumerate(group, start=first):
            num_pads = len(group[-1].prompt) - len(served.prompt)
            spare = [layer.num_spare_rows for layer in self._plan.layers]
            self.cache.num_pads[:, slot] = [min(num_pads, most) for most in spare]
