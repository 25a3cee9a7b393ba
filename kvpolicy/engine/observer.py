"""Shows policies the tokens of each sequence, many at a time.

Prompts are shown as they come in. In decode, hidden states are written in place into a slab
of as many rows as the smallest buffer, and shown when it is full or something is about to be
compacted: no policy runs in a decode step that does neither.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kvpolicy.cache.slab import Cache
from kvpolicy.engine.isolation import ErrorScope
from kvpolicy.engine.sequence import LiveSequence
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import Clock
from kvpolicy.plan.resolved import LayerPlan
from kvpolicy.state import Memory, RegisterFile


class Observer:
    """Keeps what was not shown yet, and shows it.

    Attributes:
        wants_states: Whether some policy reads hidden states.
    """

    def __init__(
        self,
        layers: Sequence[LayerPlan],
        stacks: Sequence[Stack],
        registers: RegisterFile,
        tokenizer: Any,
        clock: Clock,
        asking: ErrorScope | None = None,
    ) -> None:
        pairs = zip(stacks, layers, strict=True)
        watching = [pair for pair in pairs if pair[0].implements("observe")]
        # Layers with the same stack share it, and it is shown everything once.
        self._stacks = list(dict.fromkeys(stack for stack, _ in watching))
        self._interval = min((layer.buffer for _, layer in watching), default=0)
        self._registers = registers
        self._tokenizer = tokenizer
        self._clock = clock
        self._asking = asking or ErrorScope("raise")
        self._cache: Cache
        self._states: Tensor | None = None
        self.wants_states = any("hidden_states" in stack.observes for stack in self._stacks)

    def attach(self, cache: Cache, hidden_size: int, dtype: torch.dtype, device: Any) -> None:
        """Watch over the sequences of a cache, with room for the hidden states of its slots."""
        self._cache = cache
        if self.wants_states:
            size = (cache.num_slots, self._interval, hidden_size)
            self._states = torch.zeros(size, dtype=dtype, device=device)
            cache.slot_tensors.append(self._states)

    def show_prompt(
        self, sequences: Sequence[LiveSequence], first: int, states: Tensor | None
    ) -> None:
        """Show a chunk of each prompt.

        Args:
            sequences: Sequences just fed, in the order of their slots.
            first: Slot of the first of them.
            states: Last hidden states of the chunk, ``[B, L, M]``, padded on the left.
        """
        if not self._stacks:
            return
        for place, sequence in enumerate(sequences):
            num_new = self._num_pending(sequence, first + place)
            self._show(
                sequence, first + place, None if states is None else states[place, -num_new:]
            )

    def note(self, sequences: Sequence[LiveSequence], states: Tensor | None) -> None:
        """Keep what a decode step has brought, and show what fills the slab.

        Args:
            sequences: All active sequences, in the order of their slots.
            states: Last hidden states of their newest tokens, ``[B, M]``.
        """
        if not self._stacks:
            return
        pending = [self._num_pending(sequence, slot) for slot, sequence in enumerate(sequences)]
        if self._states is not None:
            assert states is not None
            place = torch.tensor(pending, device=states.device) - 1
            self._states[torch.arange(len(pending), device=states.device), place] = states
        for slot, sequence in enumerate(sequences):
            if pending[slot] >= self._interval:
                self.flush(sequence, slot)

    def flush(self, sequence: LiveSequence, slot: int) -> None:
        """Show what was kept of a sequence."""
        num_new = self._num_pending(sequence, slot) if self._stacks else 0
        if num_new:
            self._show(
                sequence, slot, None if self._states is None else self._states[slot, :num_new]
            )

    def _num_pending(self, sequence: LiveSequence, slot: int) -> int:
        return int(self._cache.seq_len[slot]) - sequence.num_observed

    def _show(self, sequence: LiveSequence, slot: int, states: Tensor | None) -> None:
        start, end = sequence.num_observed, int(self._cache.seq_len[slot])
        token_ids = torch.tensor(sequence.token_ids(start, end))
        sequence.num_observed = end
        mine = self._registers.of_slots(slot, slot + 1)
        with (
            self._asking.about([sequence]),
            self._clock.time("observe_s", None if states is None else states.device),
            nullcontext(mine) if states is None else mine.on(states.device) as registers,
        ):
            for stack in self._stacks:
                stack.observe(
                    token_ids=token_ids,
                    hidden_states=states if "hidden_states" in stack.observes else None,
                    start=start,
                    prompt_len=len(sequence.prompt),
                    tokenizer=self._tokenizer,
                    registers=registers,
                    memory=Memory([sequence.memory]),
                )
