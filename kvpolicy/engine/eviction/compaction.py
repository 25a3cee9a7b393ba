"""Compaction: which sequences are due in each layer, and what evicting their rows costs them."""

from collections import abc

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.slab import KVCache
from kvpolicy.engine.eviction.eviction import DueSlot, Eviction, MakeRows
from kvpolicy.engine.eviction.marker import Marker
from kvpolicy.engine.eviction.observer import Observer
from kvpolicy.engine.eviction.probing import Prober
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.plan.resolved import LayerPlan
from kvpolicy.state import Bound, Memory


class Compactor:
    """Compacts what is due after each forward.

    Attributes:
        num_compactions: Compactions of one sequence in one layer, so far.
        settle: Checks answers of policies that were not checked at once, see `Eviction.settle`.
        eviction: Evicts the rows.
    """

    def __init__(
        self,
        cache: KVCache,
        layers: abc.Sequence[LayerPlan],
        stacks: abc.Sequence[Stack],
        observer: Observer,
        marker: Marker,
        prober: Prober,
        timings: PolicyTimings,
        errors: ErrorScope,
        make_rows: MakeRows = LayerRows,
        bound: abc.Sequence[Bound] | None = None,
    ) -> None:
        self.num_compactions = 0
        self._cache = cache
        self._layers = layers
        self._stacks = stacks
        self._observer, self._marker, self._prober = observer, marker, prober
        self._errors = errors
        self._make_rows = make_rows
        self.eviction = Eviction(cache, timings, errors, make_rows, bound)
        self.settle = self.eviction.settle
        self._due_layers = [
            layer_idx
            for layer_idx, (layer, stack) in enumerate(zip(layers, stacks, strict=True))
            if layer.budget is not None and stack.implements("due")
        ]
        self._budgets = np.array([layer.budget or np.inf for layer in layers])[:, None]

    @property
    def asks_due(self) -> bool:
        """Whether policies say after every token which sequences are due."""
        return bool(self._due_layers)

    def compact(self, sequences: abc.Sequence[Sequence]) -> None:
        """Compact what is due of some sequences, unless they have ended.

        In layers with a sliding window, rows that have left it are dropped first, and hooks
        are called only if more than the budget remain.

        Args:
            sequences: The sequences of the forward just done.
        """
        cache, slots = self._cache, [seq.slot for seq in sequences]
        due = cache.full(slots)  # [layers, sequences]
        if not (self._due_layers or due.any()):
            return
        self._ask_due(due, sequences, slots)
        over_budget = self._budgets - cache.num_pads[:, slots]
        due &= cache.num_candidates(slots) > over_budget
        due &= np.array([seq.finish_reason is None for seq in sequences])
        if not due.any():
            return
        for index in np.flatnonzero(due.any(axis=0)).tolist():
            self.note_peak(sequences[index])
        places = [(layer_idx, slots[index]) for layer_idx, index in np.argwhere(due).tolist()]
        cache.drop_unseen(places, self._make_rows)
        due &= cache.num_candidates(slots) > over_budget
        for index in np.flatnonzero(due.any(axis=0)).tolist():
            self._observer.flush(sequences[index])
            self._marker.flush(sequences[index], np.flatnonzero(due[:, index]).tolist())
            sequences[index].compactions += 1
        probed = self._prober.run(sequences, due)
        rows, before = cache.rows, cache.rows.copy()
        self.eviction.run(
            DueSlot(
                layer_idx,
                sequences[index],
                self._stacks[layer_idx],
                int(over_budget[layer_idx, index]),
                probed.get((layer_idx, sequences[index].slot)),
            )
            for layer_idx, index in np.argwhere(due).tolist()
        )
        num_evicted = before - rows
        for seq in sequences:
            seq.rows_evicted += int(num_evicted[:, seq.slot].sum())
        self.num_compactions += int(np.count_nonzero(num_evicted))

    def note_peak(self, seq: Sequence) -> None:
        """Update the peaks of a sequence.

        Rows only grow between compactions: this is needed before each, and at the end.
        """
        rows = self._cache.rows[:, seq.slot]
        seq.peak_rows = max(seq.peak_rows, int(rows.max()))
        seq.peak_bytes = max(seq.peak_bytes, int(rows @ self._cache.row_bytes))
        seq.full_bytes = self._cache.full_bytes(seq.slot)

    def _ask_due(
        self, due: np.ndarray, sequences: abc.Sequence[Sequence], slots: list[int]
    ) -> None:
        """Add what policies want compacted, ``[layers, B]``; nothing whose prompt is not all in."""
        prompt_len = np.array([len(seq.prompt) for seq in sequences])
        seq_len = self._cache.seq_len[slots]
        candidates = self._cache.num_candidates(slots)
        answers: dict[object, Tensor | None] = {}
        for layer_idx in self._due_layers:
            layer, stack = self._layers[layer_idx], self._stacks[layer_idx]
            rows = candidates[layer_idx]
            # Layers that are treated alike and hold equally many rows share an answer.
            key = (
                (id(stack), layer.budget, layer.buffer, rows.tobytes())
                if stack.folds
                else layer_idx
            )
            if key not in answers:
                answers[key] = None
                with self._errors.covering(sequences):
                    answers[key] = stack.due(
                        layer_idx,
                        num_rows=torch.from_numpy(rows),
                        seq_len=torch.from_numpy(seq_len),
                        prompt_len=torch.from_numpy(prompt_len),
                        budget=layer.budget,
                        buffer=layer.buffer,
                        memory=Memory([seq.memory for seq in sequences]),
                    )
            answer = answers[key]
            if answer is not None:
                due[layer_idx] |= answer.numpy() & (seq_len >= prompt_len)
