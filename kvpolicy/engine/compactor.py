"""When to compact: finds the sequences that are due in each layer, and keeps their accounts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.slab import Cache
from kvpolicy.cache.sliding_window import drop_expired
from kvpolicy.engine.compaction import compact
from kvpolicy.engine.isolation import ErrorScope
from kvpolicy.engine.observer import Observer
from kvpolicy.engine.sequence import LiveSequence
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import Clock
from kvpolicy.plan.resolved import LayerPlan


class Compactor:
    """Compacts what is due after each forward of a run.

    Attributes:
        num_compactions: Compactions of one sequence in one layer, so far.
    """

    def __init__(
        self,
        cache: Cache,
        layers: Sequence[LayerPlan],
        stacks: Sequence[Stack],
        observer: Observer,
        clock: Clock,
        asking: ErrorScope | None = None,
    ) -> None:
        self.num_compactions = 0
        self._asking = asking or ErrorScope("raise")
        self._clock = clock
        self._cache = cache
        self._observer = observer
        self._layers = layers
        self._stacks = stacks
        self._asks_due = [
            layer.budget is not None and stack.implements("due")
            for layer, stack in zip(layers, stacks, strict=True)
        ]
        self._budgets = np.array([layer.budget or np.inf for layer in layers])[:, None]
        windows = [layer.shape.sliding_window for layer in cache.layers]
        self._has_window = np.array([window is not None for window in windows])[:, None]

    def compact(self, active: Sequence[LiveSequence], first: int, last: int) -> None:
        """Compact what is due in the slots ``[first, last)``; ended sequences are left alone.

        In layers with a sliding window, rows that have left it go first, and policies are
        asked only if more than the budget are left.

        Args:
            active: The sequences in use, in the order of their slots.
            first: First slot of the forward just done.
            last: Slot after its last one.
        """
        cache = self._cache
        pads = cache.num_pads[:, first:last]
        due = cache.full(first, last)  # [layers, slots]
        if not (due.any() or any(self._asks_due)):
            return
        served = active[first:last]
        for layer_idx, asks in enumerate(self._asks_due):
            if asks:
                due[layer_idx] |= self._ask_due(layer_idx, served, first, last)
        due &= cache.rows[:, first:last] > self._budgets - pads
        due &= np.array([sequence.finish_reason is None for sequence in served])
        for place in np.flatnonzero(due.any(axis=0)).tolist():
            self.note_peak(served[place], first + place)
        for layer_idx in np.flatnonzero((due & self._has_window).any(axis=1)).tolist():
            slots = [first + place for place in np.flatnonzero(due[layer_idx]).tolist()]
            drop_expired(cache, layer_idx, slots)
        due &= cache.rows[:, first:last] > self._budgets - pads
        for place in np.flatnonzero(due.any(axis=0)).tolist():
            self._observer.flush(served[place], first + place)
            served[place].compactions += 1
        for layer_idx in np.flatnonzero(due.any(axis=1)).tolist():
            slots = [first + place for place in np.flatnonzero(due[layer_idx]).tolist()]
            # A policy may have failed for some of them in a layer before, or in `observe`.
            slots = [slot for slot in slots if active[slot].finish_reason is None]
            if slots:
                self._compact_layer(layer_idx, slots, active)

    def note_peak(self, sequence: LiveSequence, slot: int) -> None:
        """Note how much a sequence holds now.

        Rows only grow between compactions: it is enough to look before each, and at the end.
        """
        rows = self._cache.rows[:, slot]
        row_bytes = [layer.shape.row_bytes for layer in self._cache.layers]
        sequence.peak_rows = max(sequence.peak_rows, int(rows.max()))
        sequence.peak_bytes = max(sequence.peak_bytes, int(rows @ row_bytes))

    def _ask_due(
        self, layer_idx: int, served: Sequence[LiveSequence], first: int, last: int
    ) -> np.ndarray:
        """Which sequences a layer's policies want compacted; none whose prompt is not in."""
        layer = self._layers[layer_idx]
        prompt_len = np.array([len(sequence.prompt) for sequence in served])
        seq_len = self._cache.seq_len[first:last]
        answer: Tensor | None = None
        with self._asking.about(served):
            answer = self._stacks[layer_idx].due(
                layer_idx,
                num_rows=torch.from_numpy(self._cache.rows[layer_idx, first:last].copy()),
                seq_len=torch.from_numpy(seq_len.copy()),
                prompt_len=torch.from_numpy(prompt_len),
                budget=layer.budget,
                buffer=layer.buffer,
            )
        if answer is None:
            return np.zeros(last - first, dtype=bool)
        wanted: np.ndarray = answer.numpy() & (seq_len >= prompt_len)
        return wanted

    def _compact_layer(
        self, layer_idx: int, slots: list[int], active: Sequence[LiveSequence]
    ) -> None:
        budget = self._layers[layer_idx].budget
        assert budget is not None
        rows = self._cache.rows[layer_idx]
        before = rows[slots].copy()
        memories = [active[slot].memory for slot in slots]
        stack = self._stacks[layer_idx]
        budgets = (budget - self._cache.num_pads[layer_idx, slots]).tolist()

        def asking(places: Sequence[int]) -> AbstractContextManager[None]:
            return self._asking.about([active[slots[place]] for place in places])

        compact(self._cache, layer_idx, slots, stack, budgets, memories, self._clock, asking)
        num_leaving = before - rows[slots]
        for slot, num in zip(slots, num_leaving, strict=True):
            active[slot].rows_evicted += int(num)
        self.num_compactions += int(np.count_nonzero(num_leaving))
