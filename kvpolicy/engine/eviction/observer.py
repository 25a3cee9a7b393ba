"""Calls `observe` with several new tokens of a sequence at a time.

In prefill, `observe` is called once per chunk. In decode, hidden states are collected in a tensor
with as many rows as the smallest buffer; `observe` is called when it is full, and before a
compaction. All other decode steps call no policy.
"""

import sys
from collections import abc
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kvpolicy.cache.rings import LAST_STATES, StateRing
from kvpolicy.cache.slab import KVCache
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.plan.resolved import LayerPlan
from kvpolicy.state import Memory, RegisterFile


class Observer:
    """Collects unobserved tokens and hidden states, and calls `observe`.

    Attributes:
        stacks: The stacks that implement `observe`, without repetitions.
        wants_states: Whether any policy reads hidden states.
        ring: Keeps unobserved hidden states of each slot, if any policy reads them.
    """

    def __init__(
        self,
        layers: abc.Sequence[LayerPlan],
        stacks: abc.Sequence[Stack],
        registers: RegisterFile,
        tokenizer: Any,
        timings: PolicyTimings,
        errors: ErrorScope,
    ) -> None:
        pairs = zip(stacks, layers, strict=True)
        observing = [pair for pair in pairs if pair[0].implements("observe")]
        # Layers with the same policies share a stack, which observes each token once.
        self.stacks = list(dict.fromkeys(stack for stack, _ in observing))
        self._interval = min((layer.buffer for _, layer in observing), default=0)
        self._registers = registers
        self._tokenizer = tokenizer
        self._timings = timings
        self._errors = errors
        self._cache: KVCache
        self.ring: StateRing | None = None
        self.wants_states = any("hidden_states" in stack.observes for stack in self.stacks)

    def attach(self, cache: KVCache, hidden_size: int, dtype: torch.dtype, device: Any) -> None:
        """Use a cache, and allocate the tensor of unobserved hidden states of its slots."""
        self._cache = cache
        if self.wants_states:
            of_last = {LAST_STATES: device}
            self.ring = StateRing(cache, self._interval, hidden_size, dtype, of_last)

    def show_prompt(self, sequences: abc.Sequence[Sequence], states: Tensor | None) -> None:
        """Call `observe` for a chunk of each prompt.

        Args:
            sequences: The sequences of the chunk.
            states: Last hidden states of the chunk, ``[B, L, M]``, padded on the left.
        """
        if not self.stacks:
            return
        for row, seq in enumerate(sequences):
            num_new = self._num_pending(seq)
            self._show(seq, None if states is None else states[row, -num_new:])

    def note(self, sequences: abc.Sequence[Sequence], states: Tensor) -> None:
        """Collect the hidden states of a decode step that does not collect them itself.

        Args:
            sequences: The sequences of the step.
            states: Last hidden states of their newest tokens, ``[B, M]``.
        """
        if self.ring is not None:
            before = [self._num_pending(seq) - 1 for seq in sequences]
            self.ring.note([seq.slot for seq in sequences], before, states)

    def num_free(self, sequences: abc.Sequence[Sequence]) -> int:
        """Tokens that each of these sequences can still take before `observe` is called."""
        most = max(map(self._num_pending, sequences)) if self.stacks else 0
        return self._interval - most if self.stacks else sys.maxsize

    def flush_full(self, sequences: abc.Sequence[Sequence]) -> None:
        """Call `observe` for the sequences whose interval is full."""
        for seq in sequences if self.stacks else ():
            if self._num_pending(seq) >= self._interval:
                self.flush(seq)

    def flush(self, seq: Sequence) -> None:
        """Call `observe` for all unobserved tokens of a sequence."""
        num_new = self._num_pending(seq) if self.stacks else 0
        if num_new:
            self._show(seq, None if self.ring is None else self.ring.take(seq.slot, num_new))

    def pending_states(self, seq: Sequence) -> Tensor | None:
        """A copy of the unobserved hidden states of a sequence, ``[N, M]``, if they are wanted."""
        if self.ring is None:
            return None
        return self.ring.take(seq.slot, self._num_pending(seq)).clone()

    def put_states(self, seq: Sequence, states: Tensor | None) -> None:
        """Have a sequence go on with unobserved hidden states, ``[N, M]``, of another slot."""
        if self.ring is not None:
            assert states is not None
            self.ring.put(seq.slot, states)

    def _num_pending(self, seq: Sequence) -> int:
        return int(self._cache.seq_len[seq.slot]) - seq.num_observed

    def _show(self, seq: Sequence, states: Tensor | None) -> None:
        start, end = seq.num_observed, int(self._cache.seq_len[seq.slot])
        token_ids = torch.tensor(seq.token_ids(start, end))
        seq.num_observed = end
        own = self._registers.of_slots(seq.slot, seq.slot + 1)
        with (
            self._errors.covering([seq]),
            self._timings.time("observe_s", None if states is None else states.device),
            nullcontext(own) if states is None else own.on(states.device) as registers,
        ):
            for stack in self.stacks:
                stack.observe(
                    token_ids=token_ids,
                    hidden_states=states if "hidden_states" in stack.observes else None,
                    start=start,
                    prompt_len=len(seq.prompt),
                    tokenizer=self._tokenizer,
                    registers=registers,
                    memory=Memory([seq.memory]),
                )
