"""Compaction: which sequences are due in each layer; score, select and evict their rows."""

from collections import abc, defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.slab import ATTN_SUMS, KVCache
from kvpolicy.cache.sliding_window import drop_oldest, num_expired
from kvpolicy.engine.isolation import ErrorScope
from kvpolicy.engine.observer import Observer
from kvpolicy.engine.sequence import Sequence
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.plan.resolved import LayerPlan
from kvpolicy.state import Memory, SequenceMemory

# Makes the rows of some slots in one layer.
MakeRows = abc.Callable[[KVCache, int, abc.Sequence[int]], LayerRows]


class Compactor:
    """Compacts what is due after each forward.

    Attributes:
        num_compactions: Compactions of one sequence in one layer, so far.
    """

    def __init__(
        self,
        cache: KVCache,
        layers: abc.Sequence[LayerPlan],
        stacks: abc.Sequence[Stack],
        observer: Observer,
        timings: PolicyTimings,
        errors: ErrorScope,
        make_rows: MakeRows = LayerRows,
    ) -> None:
        self.num_compactions = 0
        self._cache = cache
        self._layers = layers
        self._stacks = stacks
        self._observer = observer
        self._timings = timings
        self._errors = errors
        self._make_rows = make_rows
        self._due_layers = [
            layer_idx
            for layer_idx, (layer, stack) in enumerate(zip(layers, stacks, strict=True))
            if layer.budget is not None and stack.implements("due")
        ]
        self._budgets = np.array([layer.budget or np.inf for layer in layers])[:, None]
        windows = [layer.shape.sliding_window for layer in cache.layers]
        self._has_window = np.array([window is not None for window in windows])[:, None]

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
        for layer_idx in self._due_layers:
            due[layer_idx] |= self._ask_due(layer_idx, sequences, slots)
        over_budget = self._budgets - cache.num_pads[:, slots]
        due &= cache.rows[:, slots] > over_budget
        due &= np.array([seq.finish_reason is None for seq in sequences])
        for index in np.flatnonzero(due.any(axis=0)).tolist():
            self.note_peak(sequences[index])
        for layer_idx, index in np.argwhere(due & self._has_window).tolist():
            self._drop_expired(layer_idx, slots[index])
        due &= cache.rows[:, slots] > over_budget
        for index in np.flatnonzero(due.any(axis=0)).tolist():
            self._observer.flush(sequences[index])
            sequences[index].compactions += 1
        for layer_idx in np.flatnonzero(due.any(axis=1)).tolist():
            chosen = [sequences[index] for index in np.flatnonzero(due[layer_idx]).tolist()]
            # A policy may have failed for some of them in a layer before, or in `observe`.
            chosen = [seq for seq in chosen if seq.finish_reason is None]
            if chosen:
                self._compact_layer(layer_idx, chosen)

    def note_peak(self, seq: Sequence) -> None:
        """Update the peaks of a sequence.

        Rows only grow between compactions: this is needed before each, and at the end.
        """
        rows = self._cache.rows[:, seq.slot]
        seq.peak_rows = max(seq.peak_rows, int(rows.max()))
        seq.peak_bytes = max(seq.peak_bytes, int(rows @ self._cache.row_bytes))
        seq.full_bytes = self._cache.full_bytes(seq.slot)

    def _ask_due(
        self, layer_idx: int, sequences: abc.Sequence[Sequence], slots: list[int]
    ) -> np.ndarray:
        """Sequences that a layer's policies want compacted; none whose prompt is not all in."""
        layer = self._layers[layer_idx]
        prompt_len = np.array([len(seq.prompt) for seq in sequences])
        seq_len = self._cache.seq_len[slots]
        answer: Tensor | None = None
        with self._errors.covering(sequences):
            answer = self._stacks[layer_idx].due(
                layer_idx,
                num_rows=torch.from_numpy(self._cache.rows[layer_idx, slots]),
                seq_len=torch.from_numpy(seq_len),
                prompt_len=torch.from_numpy(prompt_len),
                budget=layer.budget,
                buffer=layer.buffer,
            )
        if answer is None:
            return np.zeros(len(slots), dtype=bool)
        wanted: np.ndarray = answer.numpy() & (seq_len >= prompt_len)
        return wanted

    def _drop_expired(self, layer_idx: int, slot: int) -> None:
        num = num_expired(self._make_rows(self._cache, layer_idx, [slot]))
        if num:
            drop_oldest(self._cache, layer_idx, [slot], num)

    def _compact_layer(self, layer_idx: int, sequences: list[Sequence]) -> None:
        budget = self._layers[layer_idx].budget
        assert budget is not None
        rows, slots = self._cache.rows[layer_idx], [seq.slot for seq in sequences]
        before = rows[slots]
        budgets = (budget - self._cache.num_pads[layer_idx, slots]).tolist()
        compact(
            self._cache,
            layer_idx,
            [
                DueSlot(seq.slot, rows_that_stay, len(seq.prompt), seq.memory)
                for seq, rows_that_stay in zip(sequences, budgets, strict=True)
            ],
            self._stacks[layer_idx],
            buffer=self._layers[layer_idx].buffer,
            timings=self._timings,
            scope=lambda chosen: self._errors.covering(
                [seq for seq in sequences if seq.slot in chosen]
            ),
            make_rows=self._make_rows,
        )
        num_evicted = before - rows[slots]
        for seq, num in zip(sequences, num_evicted.tolist(), strict=True):
            seq.rows_evicted += num
        self.num_compactions += int(np.count_nonzero(num_evicted))


@attrs.frozen(eq=False)
class DueSlot:
    """A slot to compact.

    Attributes:
        slot: Its number.
        budget: Rows that stay.
        prompt_len: Tokens of the prompt of its sequence.
        memory: What policies remember of its sequence.
    """

    slot: int
    budget: int
    prompt_len: int
    memory: SequenceMemory


def compact(
    cache: KVCache,
    layer_idx: int,
    due: abc.Sequence[DueSlot],
    stack: Stack,
    buffer: int,
    timings: PolicyTimings,
    scope: abc.Callable[[list[int]], AbstractContextManager[None]] = lambda _: nullcontext(),
    make_rows: MakeRows = LayerRows,
) -> None:
    """Bring the given slots of one layer within their budget.

    Args:
        cache: The KV cache; changed in place.
        layer_idx: Decoder layer, counted from 0.
        due: Slots that are due. Those within the budget already are left alone.
        stack: The layer's policies.
        buffer: Rows that may be added to the budget.
        timings: Measures the time of policies.
        scope: Makes the block in which hooks are called for some of the slots.
        make_rows: Makes the rows that hooks see.

    Raises:
        HookError: If a policy raises.
        HookResultError: If a policy's answer breaks the contract.
    """
    groups: dict[tuple[int, int, int], list[DueSlot]] = defaultdict(list)
    for one in due:
        num_rows = int(cache.rows[layer_idx, one.slot])
        if num_rows > one.budget:
            # Hooks see no padding: sequences with equally many rows and stored queries are
            # compacted together.
            window = min(int(cache.seq_len[one.slot]), stack.window_size)
            groups[one.budget, num_rows, window].append(one)
    for (budget, _, _), chosen in groups.items():
        slots = [one.slot for one in chosen]
        rows = make_rows(cache, layer_idx, slots)
        with scope(slots):
            _compact_rows(rows, layer_idx, stack, chosen, budget, buffer, timings)


def _compact_rows(
    rows: LayerRows,
    layer_idx: int,
    stack: Stack,
    due: abc.Sequence[DueSlot],
    budget: int,
    buffer: int,
    timings: PolicyTimings,
) -> None:
    """Score the rows, select those that stay, and evict the others."""
    memory, positions = Memory([one.memory for one in due]), rows.positions
    named = "prompt_len" in stack.reads
    shared: dict[str, Any] = {
        "positions": positions,
        "prompt_len": torch.tensor([one.prompt_len for one in due]) if named else None,
        "budget": budget,
        "memory": memory,
    }
    device = positions.device
    with timings.time("score_s", device):
        scores = stack.score(rows, layer_idx, shared | _score_arguments(rows, stack, buffer))
        out_of_sight = rows.out_of_sight
        if out_of_sight is not None:  # in some heads; what all heads cannot see was dropped
            scores = scores.masked_fill(out_of_sight, float("-inf"))
    with timings.time("select_s", device):
        keep = stack.select(layer_idx, scores=scores, **shared)
    with timings.time("compaction_s", device):
        stack.evict(rows, keep, layer_idx, memory)


def _score_arguments(rows: LayerRows, stack: Stack, buffer: int) -> dict[str, Any]:
    """Arguments of `score` only; tensors that no policy names are not computed."""
    reads = stack.reads
    return {
        "keys": rows.keys if "keys" in reads else None,
        "values": rows.values if "values" in reads else None,
        "queries": rows.queries if "queries" in reads else None,
        "attn_weights": rows.attn_weights if "attn_weights" in reads else None,
        "attn_sums": rows.track(ATTN_SUMS) if ATTN_SUMS in reads else None,
        "seq_len": rows.seq_len,
        "num_new": rows.num_new if "num_new" in reads else None,
        "buffer": buffer,
        "tracks": rows.tracks,
    }
