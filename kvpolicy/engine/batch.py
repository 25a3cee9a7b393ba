"""The running batch: sequences in their slots, prefilled, decoded and compacted together.

The sequences being served always occupy the first slots: when one ends, the last one moves to its
slot. So no forward computes anything for an empty slot.

A batch runs no forward itself. ``begin_prefill_chunk`` and ``begin_decode`` give the input of one;
``finish_prefill_chunk`` and ``finish_decode`` take its output; ``compact`` evicts what is due. The
engine calls them in a loop, and so does `kvpolicy.hf.PolicyCache` within ``model.generate``.
"""

from collections import abc
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.cache.layout import StepLayout
from kvpolicy.engine.compaction import Compactor
from kvpolicy.engine.isolation import ErrorScope
from kvpolicy.engine.observer import Observer
from kvpolicy.engine.sequence import Sequence
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.model.adapter import ForwardInput, ModelAdapter
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.state import Memory, RegisterFile

# Receives the logits after the newest token of some sequences, ``[B, V]``.
OnLogits = abc.Callable[[abc.Sequence[Sequence], Tensor], None]


class RunningBatch:
    """Sequences in their slots, with the cache and what policies keep of them.

    Attributes:
        active: The sequences being served, in the order of their slots.
        cache: Their rows.
        timings: Seconds that policies took.
        compactor: Evicts rows.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        plan: ResolvedPlan,
        stacks: abc.Sequence[Stack],
        errors: ErrorScope,
        *,
        tokenizer: Any,
        chunk: int,
        num_slots: int,
        longest: int,
    ) -> None:
        """Allocate everything for sequences of at most ``longest`` tokens.

        Args:
            adapter: The model.
            plan: The plan.
            stacks: The policies of each layer.
            errors: Isolates errors of hooks.
            tokenizer: The model's, if there is one.
            chunk: The most prompt tokens of one sequence in one forward.
            num_slots: The most sequences.
            longest: Tokens of the longest sequence.
        """
        self.active: list[Sequence] = []
        self.timings = PolicyTimings()
        self._plan, self._stacks, self._errors = plan, stacks, errors
        self._tokenizer, self._chunk = tokenizer, chunk
        self._steers = any(stack.is_steered(i) for i, stack in enumerate(stacks))
        self._forward: ForwardInput  # the last one begun
        pairs = list(zip(stacks, plan.layers, strict=True))
        slabs = [stack.slab(layer.capacity(longest)) for stack, layer in pairs]
        self.cache = adapter.new_cache(slabs, num_slots)
        policies = [policy for stack in stacks for policy in stack.policies]
        self._registers = RegisterFile(policies, num_slots, adapter.device)
        self.cache.slot_tensors += self._registers.all
        self._observer = Observer(
            plan.layers, stacks, self._registers, tokenizer, self.timings, errors
        )
        self._observer.attach(
            self.cache, adapter.hidden_size, adapter.model.dtype, adapter.last_device
        )
        self.compactor = Compactor(
            self.cache,
            plan.layers,
            stacks,
            self._observer,
            self.timings,
            errors,
            adapter.processes.layer_rows,
        )

    @property
    def num_free(self) -> int:
        """Free slots."""
        return self.cache.num_slots - len(self.active)

    def grow(self, longest: int) -> None:
        """Enlarge the slabs for sequences of ``longest`` tokens; stored rows are kept."""
        pairs = zip(self._stacks, self._plan.layers, strict=True)
        self.cache.grow([stack.slab(layer.capacity(longest)) for stack, layer in pairs])

    def take(self, source: "RunningBatch", numbers: abc.Sequence[int]) -> None:
        """Fill all slots with copies of sequences of another batch, or of this one.

        Slots, memory and registers are copied; the model, the plan and the policies are shared.

        Args:
            source: The other batch; it has the same engine, and slabs of the same size.
            numbers: Numbers of its sequences, one for each slot here. They are renumbered.

        Raises:
            CacheError: If a policy remembers something that cannot be copied.
        """
        slot_of = {seq.id: slot for slot, seq in enumerate(source.active)}
        slots = [slot_of[number] for number in numbers]
        shared = [policy for stack in self._stacks for policy in stack.policies]
        active = [
            source.active[slot].copied(number, [*shared, self._tokenizer])
            for number, slot in enumerate(slots)
        ]
        self.cache.take(source.cache, slots)
        self.active = active
        self.timings = attrs.evolve(source.timings)
        self.compactor.num_compactions = source.compactor.num_compactions

    def admit(self, group: abc.Sequence[Sequence]) -> None:
        """Give the sequences of a group free slots."""
        # In order of length, so that those whose prompt is not all in have the last slots.
        group = sorted(group, key=lambda seq: len(seq.prompt))
        self.active.extend(group)
        if self._plan.padding == "stored":
            self._count_pads(group)

    def begin_prefill_chunk(self) -> ForwardInput | None:
        """The next chunk of prompts that are not all in; ``None`` if all are."""
        num_left = [self._num_left(slot) for slot in range(len(self.active))]
        first = next((slot for slot, num in enumerate(num_left) if num), None)
        if first is None:
            return None
        # Slots are prefilled together while none has less left than the one before it: then
        # those that complete first come first.
        last = first + 1
        while last < len(num_left) and num_left[last] >= num_left[last - 1]:
            last += 1
        width = min(self._chunk, self.cache.num_free_rows(first, last))
        chunks = []
        for slot in range(first, last):
            # Tokens generated before another turn may not all have been observed.
            self._observer.flush(self.active[slot], slot)
            start = int(self.cache.seq_len[slot])
            chunks.append(self.active[slot].prompt[start : start + width])
        totals = [len(seq.prompt) for seq in self.active[first:last]]
        step = StepLayout(self.cache, first, [len(chunk) for chunk in chunks], totals)
        token_ids = torch.zeros(len(chunks), step.width, dtype=torch.int64)
        for row, chunk in enumerate(chunks):
            token_ids[row, step.width - len(chunk) :] = torch.tensor(chunk)
        self._forward = ForwardInput(token_ids, step, None, self._observer.wants_states)
        return self._forward

    def finish_prefill_chunk(
        self, logits: Tensor, states: Tensor | None, on_logits: OnLogits
    ) -> None:
        """Take the output of a prefill chunk.

        Args:
            logits: Logits after the newest token of each sequence, ``[B, V]``.
            states: Last hidden states, ``[B, L, M]``, if wanted.
            on_logits: Receives the logits of the sequences whose whole prompt is in.
        """
        step = self._forward.step
        sequences = self.active[step.first : step.last]
        complete = [row for row in range(len(sequences)) if not self._num_left(step.first + row)]
        if complete:
            on_logits([sequences[row] for row in complete], logits[complete])
        self._observer.show_prompt(sequences, step.first, states)

    def begin_decode(self) -> ForwardInput:
        """The forward of the newest token of every sequence."""
        active = self.active
        token_ids = torch.tensor([seq.tokens[-1] for seq in active])
        step = StepLayout(self.cache, 0, [1] * len(active))
        steer = partial(self._steer, token_ids) if self._steers else None
        self._forward = ForwardInput(token_ids[:, None], step, steer, self._observer.wants_states)
        return self._forward

    def finish_decode(self, logits: Tensor, states: Tensor | None, on_logits: OnLogits) -> None:
        """Take the output of a decode step.

        Args:
            logits: Logits after the newest token of each sequence, ``[B, V]``.
            states: Last hidden states, ``[B, 1, M]``, if wanted.
            on_logits: Receives the logits.
        """
        if self.active[0].error is not None:  # a failed `steer` affects all of them
            return
        on_logits(self.active, logits)
        if self._observer.stacks:
            self._observer.note(self.active, None if states is None else states[:, -1])

    def compact(self) -> None:
        """Evict rows of the slots of the last forward, where that is due."""
        step = self._forward.step
        self.compactor.compact(self.active, step.first, step.last)

    def release(self) -> list[Sequence]:
        """Take ended sequences out of their slots; the last slots move into the gaps."""
        ended = []
        for slot in range(len(self.active) - 1, -1, -1):
            if self.active[slot].finish_reason is None:
                continue
            seq, last = self.active[slot], len(self.active) - 1
            self.compactor.note_peak(seq, slot)
            ended.append(seq)
            if slot == last:
                self.cache.clear(slot)
            else:
                self.cache.move(last, slot)
                self.active[slot] = self.active[last]
            self.active.pop()
        return ended

    def _num_left(self, slot: int) -> int:
        """Prompt tokens that are not in yet."""
        seq = self.active[slot]
        if seq.error is not None:
            return 0
        return max(len(seq.prompt) - int(self.cache.seq_len[slot]), 0)

    def _steer(self, token_ids: Tensor, layer_idx: int, states: Tensor) -> Tensor | None:
        """Ask the policies of a layer for a change to the states entering it, ``[B, M]``."""
        change, active = None, self.active
        if active[0].error is not None or not self._stacks[layer_idx].is_steered(layer_idx):
            return None
        registers = self._registers.of_slots(0, len(active))
        with (
            self._errors.covering(active),
            self.timings.time("steer_s", None),
            registers.on(states.device) as registers,
        ):
            change = self._stacks[layer_idx].steer(
                layer_idx,
                states,
                token_ids.to(states.device),
                tokenizer=self._tokenizer,
                registers=registers,
                memory=Memory([seq.memory for seq in active]),
            )
        return change

    def _count_pads(self, group: abc.Sequence[Sequence]) -> None:
        """Subtract rows for the pads of a group, for plans that study stored padding."""
        first = len(self.active) - len(group)
        for slot, seq in enumerate(group, start=first):
            num_pads = len(group[-1].prompt) - len(seq.prompt)
            spare = [layer.num_spare_rows for layer in self._plan.layers]
            self.cache.num_pads[:, slot] = [min(num_pads, most) for most in spare]
