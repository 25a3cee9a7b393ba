"""Eviction: score, select and evict the rows of slots that are due.

A call of a hook is for one layer and all its due slots that hold equally many rows, without those
of a prompt that stays, and in their fullest KV head if heads share them: so the tensors of a
sequence do not depend on the others. Layers are asked together, as one larger batch, where the
policies treat them alike and their slabs are one tensor. If such a call fails, nothing has been
evicted yet, and each layer is asked on its own, so that the error names the policy, the layer and
the sequences that it concerns.
"""

from collections import abc, defaultdict
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.slab import KVCache
from kvpolicy.engine.eviction.choice import final_scores
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.errors import HookError
from kvpolicy.hooks.late_checks import Concerned, LateChecks, settle
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.state import Bound, Memory

# Makes the rows of some slots, each in a layer.
MakeRows = abc.Callable[[KVCache, abc.Sequence[int], abc.Sequence[int]], LayerRows]

# Bytes of keys and values in one call for several layers: what a policy computes from them takes
# a few times as much.
_GPU_CALL_BYTES = 512 << 20
_CPU_CALL_BYTES = 4 << 20  # larger calls leave the cache of a core and are slower


@attrs.frozen(eq=False)
class DueSlot:
    """The slot of a sequence in a layer where it is due.

    Attributes:
        layer_idx: Decoder layer, counted from 0.
        sequence: The sequence.
        stack: The layer's policies.
        budget: Rows that stay.
        probe_queries: Queries of tokens that might follow, ``[H_q, P, D]``; ``None``: no policy has
            asked for any.
    """

    layer_idx: int
    sequence: Sequence
    stack: Stack
    budget: int
    probe_queries: Tensor | None = None

    @property
    def slot(self) -> int:
        """The slot."""
        return self.sequence.slot


class Eviction:
    """Brings slots within their budget.

    Attributes:
        call_bytes: The most bytes of keys and values in one call for several layers.
        defers: Whether values of answers are checked by `settle`, and not at once.
    """

    def __init__(
        self,
        cache: KVCache,
        timings: PolicyTimings,
        errors: ErrorScope,
        make_rows: MakeRows = LayerRows,
        bound: abc.Sequence[Bound] | None = None,
    ) -> None:
        """Bind what all compactions of a run share.

        Args:
            cache: The KV cache; changed in place.
            timings: Measures the time of policies.
            errors: Isolates errors of hooks.
            make_rows: Makes the rows that hooks see.
            bound: What policies have made of the weights of each layer; ``None``: nothing.
        """
        self._cache, self._timings, self._errors = cache, timings, errors
        self._make_rows = make_rows
        self._bound = bound or [Bound()] * len(cache.layers)
        on_cpu = all(stack.shape.device.type == "cpu" for stack in cache.stacks)
        self.call_bytes = _CPU_CALL_BYTES if on_cpu else _GPU_CALL_BYTES
        self.defers = not on_cpu
        self._late: list[LateChecks] = []

    def run(self, due: abc.Iterable[DueSlot]) -> None:
        """Compact slots.

        Args:
            due: Slots that are due, in the order of layers. Those within the budget already, and
                those whose sequence has ended, are left alone.

        Raises:
            HookError: If a policy raises.
            HookResultError: If a policy's answer breaks the contract.
        """
        groups: dict[object, list[DueSlot]] = defaultdict(list)
        for one in due:
            num_rows = self._num_rows(one)
            if num_rows > one.budget:
                # Hooks see no padding: sequences with equally many rows and stored queries are
                # compacted together.
                num_queries = min(int(self._cache.seq_len[one.slot]), one.stack.window_size)
                num_probed = 0 if one.probe_queries is None else one.probe_queries.shape[1]
                alike = num_rows, self._most_rows(one), num_queries, num_probed
                groups[self._asked(one), one.budget, *alike].append(one)
        for group in groups.values():
            for call in self._calls(group):
                self._compact(call)

    def settle(self) -> None:
        """Check the values of answers that were not checked at once; reads the device once.

        To be called where results are read anyway, before tokens are appended: those of a
        sequence whose rows were chosen wrongly are of no meaning.

        Raises:
            HookResultError: If a policy's answer breaks the contract.
        """
        if self._late:
            late, self._late = self._late, []
            settle(late)

    def _num_rows(self, due: DueSlot) -> int:
        """Rows that hooks see."""
        place = due.layer_idx, due.slot
        return int(self._cache.rows[place] - self._cache.prompt_rows[place])

    def _asked(self, due: DueSlot) -> object:
        """What the slots have in common that hooks are asked about together."""
        if not due.stack.folds:
            return due.layer_idx
        layer = self._cache.layers[due.layer_idx]
        alike = layer.softmax.softcap, id(layer.softmax.sinks)
        return id(layer.stack), id(due.stack), alike

    def _most_rows(self, due: DueSlot) -> int:
        """Rows of the fullest KV head."""
        place = due.layer_idx, due.slot
        most = int(self._cache.fullest(due.layer_idx, [due.slot])[0])
        return most - int(self._cache.prompt_rows[place])

    def _calls(self, group: list[DueSlot]) -> abc.Iterator[list[DueSlot]]:
        """Divide a group between layers, so that no call is too large."""
        first = group[0]
        row_bytes = self._cache.layers[first.layer_idx].shape.row_bytes
        most = self.call_bytes // (self._most_rows(first) * row_bytes)
        call: list[DueSlot] = []
        for layer in _by_layer(group):
            if call and len(call) + len(layer) > most:
                yield call
                call = []
            call = call + layer
        yield call

    def _compact(self, due: list[DueSlot]) -> None:
        """Compact slots, layer by layer if the layers together fail."""
        layers = _by_layer(_going_on(due))
        if len(layers) > 1 and self._compact_together(layers):
            return
        for layer in layers:
            self._compact_layer(_going_on(layer))

    def _compact_layer(self, due: list[DueSlot]) -> None:
        """Compact slots of one layer."""
        if not due:
            return
        rows, late = self._rows(due), self._late_checks(due)
        names = due[0].stack.tracks if len(due) > 1 else ()
        tracks = {name: rows.track(name).clone() for name in names}
        with self._covering(due):
            self._evict(due, rows, self._choose(due, rows, late), late)
            return
        if going := _going_on(due):  # the model has failed for others of the call
            for name, numbers in tracks.items():
                rows.set_track(name, numbers)
            self._compact_layer(going)

    def _compact_together(self, layers: list[list[DueSlot]]) -> bool:
        """Compact slots of several layers; if a policy fails to choose, nothing, and false."""
        due = list(chain.from_iterable(layers))
        rows, late = self._rows(due), self._late_checks(due)
        tracks = {name: rows.track(name).clone() for name in due[0].stack.tracks}
        try:
            keep = self._choose(due, rows, late)
        except HookError:
            for name, numbers in tracks.items():
                rows.set_track(name, numbers)
            if late is not None:
                self._late.remove(late)
            return False
        if not due[0].stack.implements("evict"):
            self._evict(due, rows, keep, late)
            return True
        # A policy that stores rows itself has changed them when it fails: ask layer by layer.
        for layer, kept in zip(layers, keep.split([len(layer) for layer in layers]), strict=True):
            chosen = _going_on(layer)
            if chosen:
                own = kept[[layer.index(one) for one in chosen]] if chosen != layer else kept
                with self._covering(chosen):
                    self._evict(chosen, self._rows(chosen), own, self._late_checks(chosen))
                    continue
                self._compact_layer(_going_on(chosen))
        return True

    def _late_checks(self, due: list[DueSlot]) -> LateChecks | None:
        """Keeps the answers to hook calls for these slots; ``None``: they are checked at once."""
        if not self.defers or due[0].stack.is_recorded:
            return None
        concerned, start = [], 0
        for layer in _by_layer(due):
            entries = slice(start, start + len(layer))
            covering = partial(self._covering, layer)
            concerned.append(Concerned(layer[0].layer_idx, entries, covering))
            start += len(layer)
        self._late.append(LateChecks(concerned))
        return self._late[-1]

    def _rows(self, due: list[DueSlot]) -> LayerRows:
        layers, slots = [one.layer_idx for one in due], [one.slot for one in due]
        rows = self._make_rows(self._cache, layers, slots)
        probed = [one.probe_queries for one in due if one.probe_queries is not None]
        rows.probe_queries = torch.stack(probed) if probed else None
        rows.budget = due[0].budget
        return rows

    @contextmanager
    def _covering(self, due: list[DueSlot]) -> abc.Iterator[None]:
        """Call hooks for slots in a block, which ends where one fails.

        What policies make of NaN is no failure of theirs if it is the model's own: then the
        sequences whose logits show it end, as they would at their next token.
        """
        sequences = [one.sequence for one in due]
        with self._errors.covering(sequences):
            try:
                yield
            except HookError:
                lost = [seq for seq in sequences if seq.is_lost]
                if not lost:
                    raise
                for seq in lost:
                    seq.fail_without_token()

    def _choose(self, due: list[DueSlot], rows: LayerRows, late: LateChecks | None) -> Tensor:
        """Ask which rows stay, ``[B, H_kv, K]``, or a mask ``[B, H_kv, T]``."""
        first, positions = due[0], rows.positions
        shared = self._shared(due) | {"positions": positions, "budget": first.budget}
        with self._timings.time("score_s", positions.device):
            scores = final_scores(
                rows,
                first.stack,
                first.layer_idx,
                late=late,
                bound=self._bound[first.layer_idx],
                **shared,
            )
        with self._timings.time("select_s", positions.device):
            heads = "own" if rows.absent is None else "shared"
            return first.stack.select(first.layer_idx, late, scores=scores, heads=heads, **shared)

    def _evict(
        self, due: list[DueSlot], rows: LayerRows, keep: Tensor, late: LateChecks | None
    ) -> None:
        first = due[0]
        with self._timings.time("compaction_s", keep.device):
            first.stack.evict(rows, keep, first.layer_idx, _memory(due), late)

    def _shared(self, due: list[DueSlot]) -> dict[str, Any]:
        """Arguments of `protect`, `score` and `select` that come from the sequences."""
        named = "prompt_len" in due[0].stack.reads
        prompt_len = torch.tensor([len(one.sequence.prompt) for one in due]) if named else None
        return {"prompt_len": prompt_len, "memory": _memory(due)}


def _memory(due: abc.Sequence[DueSlot]) -> Memory:
    return Memory([one.sequence.memory for one in due])


def _going_on(due: abc.Sequence[DueSlot]) -> list[DueSlot]:
    """Those whose sequence has not ended: a policy may have failed for it in a layer before."""
    return [one for one in due if one.sequence.finish_reason is None]


def _by_layer(due: abc.Iterable[DueSlot]) -> list[list[DueSlot]]:
    return [list(one) for _, one in groupby(due, key=lambda one: one.layer_idx)]
