"""Observe: policies read the newest tokens of a sequence, several at a time.

In prefill, `observe` is called once per chunk. In decode, hidden states are collected in a tensor
with as many rows as the smallest buffer; `observe` is called when it is full, and before a
compaction. All other decode steps call no policy.
"""

from collections import abc
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.rings import LAST_STATES, StateRing
from kvpolicy.engine.extensions.base import CoreParts, Extension
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Drawn, Output, Step
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.plan.resolved import LayerPlan
from kvpolicy.state import Memory, RegisterFile


class Observe(Extension):
    """Collects unobserved tokens and hidden states, and calls `observe`.

    Attributes:
        stacks: The stacks that implement `observe`, without repetitions.
    """

    def __init__(
        self,
        layers: abc.Sequence[LayerPlan],
        stacks: abc.Sequence[Stack],
        registers: RegisterFile,
        tokenizer: Any,
        timings: PolicyTimings,
        errors: ErrorScope,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Find who observes.

        Args:
            layers: What each layer does.
            stacks: The policies of each layer.
            registers: The registers of all slots.
            tokenizer: The model's, if there is one.
            timings: Measures the time of policies.
            errors: Isolates errors of hooks.
            hidden_size: Size of a hidden state, ``M``.
            dtype: Precision of hidden states.
            device: Where the last layer's are.
        """
        pairs = zip(stacks, layers, strict=True)
        observing = [pair for pair in pairs if pair[0].implements("observe")]
        # Layers with the same policies share a stack, which observes each token once.
        self.stacks = list(dict.fromkeys(stack for stack, _ in observing))
        self._interval = min(layer.buffer for _, layer in observing)
        self._registers, self._tokenizer = registers, tokenizer
        self._timings, self._errors = timings, errors
        self._size, self._dtype, self._device = hidden_size, dtype, device
        self._wants_states = any("hidden_states" in stack.observes for stack in self.stacks)

    def attach(self, core: CoreParts) -> None:
        """Allocate the ring of unobserved hidden states of the slots."""
        self.cache = core.cache
        if self._wants_states:
            devices = {LAST_STATES: self._device}
            self.ring = StateRing(core.cache, self._interval, self._size, self._dtype, devices)

    def num_taken(self, seq: Sequence) -> int:
        """Tokens that policies have observed."""
        return seq.num_observed

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """Tokens that each of these sequences can still take before `observe` is called."""
        return self._interval - max(map(self._num_pending, sequences), default=0)

    def before(self, step: Step) -> None:
        """Ask for hidden states; what waits from before another turn is observed first."""
        step.wants_states |= self._wants_states
        if not step.is_decode:
            for seq in step.sequences:
                self.flush(seq)

    def after(self, step: Step, output: Output, drawn: Drawn) -> None:
        """Show chunks of prompts now, and decoded tokens when the interval is full."""
        states = output.states
        if not step.is_decode:
            for row, seq in enumerate(step.sequences):
                if seq.error is None:
                    num_new = self._num_pending(seq)
                    self._show(seq, None if states is None else states[row, -num_new:])
            return
        if self.ring is not None and states is not None and not step.is_static:
            before = [self._num_pending(seq) - 1 for seq in step.sequences]
            self.ring.note(step.slots, before, states[:, -1])
        for seq in step.sequences:
            if seq.error is None and self._num_pending(seq) >= self._interval:
                self.flush(seq)

    def before_eviction(self, sequences: abc.Sequence[Sequence], due: np.ndarray) -> None:
        """Have policies read all tokens of what is compacted."""
        for index in np.flatnonzero(due.any(axis=0)).tolist():
            self.flush(sequences[index])

    def flush(self, seq: Sequence) -> None:
        """Call `observe` for all unobserved tokens of a sequence."""
        if num_new := self._num_pending(seq):
            self._show(seq, None if self.ring is None else self.ring.take(seq.slot, num_new))

    def pending_states(self, seq: Sequence) -> Tensor | None:
        """A copy of the unobserved hidden states of a sequence, ``[N, M]``, if they are wanted."""
        if self.ring is None:
            return None
        return self.ring.take(seq.slot, self._num_pending(seq)).clone()

    def resumed(self, seq: Sequence, states: Tensor | None) -> None:
        """Have a sequence go on with unobserved hidden states, ``[N, M]``, of another slot."""
        if self.ring is not None:
            assert states is not None
            self.ring.put(seq.slot, states)

    def _num_pending(self, seq: Sequence) -> int:
        return int(self.cache.seq_len[seq.slot]) - seq.num_observed

    def _show(self, seq: Sequence, states: Tensor | None) -> None:
        start, end = seq.num_observed, int(self.cache.seq_len[seq.slot])
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
                    prompt_len=seq.prompt_len(end),
                    tokenizer=self._tokenizer,
                    registers=registers,
                    memory=Memory([seq.memory]),
                )
