"""The evictor: which slots are due, and which of their rows leave.

The hooks are `due`, `protect`, `score`, `select` and `evict`, in this order.

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

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.engine.compaction import Compaction, DueSlot
from kvpolicy.engine.eviction.choice import final_scores
from kvpolicy.engine.eviction.images import ImageRows
from kvpolicy.engine.extensions.base import Extensions
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.errors import HookError, HookResultError
from kvpolicy.hooks.checks import evict_check
from kvpolicy.hooks.late_checks import Concerned, LateChecks, Unsettled
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.plan.resolved import LayerPlan, needs_budget
from kvpolicy.state import Bound, Memory

# Makes the rows of some slots, each in a layer.
MakeRows = abc.Callable[[KVCache, abc.Sequence[int], abc.Sequence[int]], LayerRows]

# Bytes of keys and values in one call for several layers: what a policy computes from them takes
# a few times as much.
_GPU_CALL_BYTES = 512 << 20
_CPU_CALL_BYTES = 4 << 20  # larger calls leave the cache of a core and are slower


class Evictor:
    """Brings slots that are due within their budgets.

    Attributes:
        num_compactions: Compactions of one sequence in one layer, so far.
        call_bytes: The most bytes of keys and values in one call for several layers.
        defers: Whether values of answers are checked by `settle`, and not at once.
    """

    def __init__(
        self,
        cache: KVCache,
        layers: abc.Sequence[LayerPlan],
        stacks: abc.Sequence[Stack],
        timings: PolicyTimings,
        errors: ErrorScope,
        *,
        extensions: Extensions | None = None,
        make_rows: MakeRows = LayerRows,
        repeats: bool = True,
        bound: abc.Sequence[Bound] | None = None,
        image_ids: abc.Collection[int] = (),
    ) -> None:
        """Bind what all compactions of a run share.

        Args:
            cache: The KV cache; changed in place.
            layers: What each layer does.
            stacks: The policies of each layer.
            timings: Measures the time of policies.
            errors: Isolates errors of hooks.
            extensions: Are told of evictions, and supply arguments of hooks; ``None``: there are
                none.
            make_rows: Makes the rows that hooks see.
            repeats: Whether layers that were asked about together are asked about one by one if
                that fails. Where processes share a model, it may have failed in one of them, and
                the others would not take part.
            bound: What policies have made of the weights of each layer; ``None``: nothing.
            image_ids: Token ids in whose place the model puts embeddings of images.
        """
        self.num_compactions = 0
        self._cache, self._layers, self._stacks = cache, layers, stacks
        self._timings, self._errors = timings, errors
        self._extensions = extensions or Extensions()
        self._make_rows, self._repeats = make_rows, repeats
        self._bound = bound or [Bound()] * len(cache.layers)
        on_cpu = all(arena.shape.device.type == "cpu" for arena in cache.arenas)
        self.call_bytes = _CPU_CALL_BYTES if on_cpu else _GPU_CALL_BYTES
        self.defers = not on_cpu
        self._late: list[LateChecks] = []
        self._image_rows = ImageRows(image_ids)
        self._ahead: dict[Sequence, np.ndarray] = {}  # see `take_back`
        self._asked_due = [
            layer_idx
            for layer_idx, (layer, stack) in enumerate(zip(layers, stacks, strict=True))
            if layer.budget is not None and stack.implements("due") and needs_budget(stack)
        ]
        self._budgets = np.array([layer.budget or np.inf for layer in layers])[:, None]

    @property
    def is_recorded(self) -> bool:
        """Whether a listener receives the hook calls."""
        return any(stack.is_recorded for stack in dict.fromkeys(self._stacks))

    @property
    def asks_due(self) -> bool:
        """Whether policies say after every token which sequences are due."""
        return bool(self._asked_due)

    def evict(self, sequences: abc.Sequence[Sequence]) -> None:
        """Compact what is due of some sequences with slots, unless they have ended.

        Rows that no later token sees are dropped first, and hooks are called only if more than the
        budget remain.

        Raises:
            HookError: If a policy raises.
            HookResultError: If a policy's answer breaks the contract.
        """
        cache, self._ahead = self._cache, {}
        # What was looked at and has seen no token since is not due.
        slots = [seq.slot for seq in sequences]
        seq_len = cache.seq_len[slots].tolist()
        new = [
            seq
            for seq, seen in zip(sequences, seq_len, strict=True)
            if seq.looked_at != seen and seq.finish_reason is None
        ]
        if len(new) < len(slots):
            slots = [seq.slot for seq in new]
        for seq, seen in zip(sequences, seq_len, strict=True):
            seq.looked_at = seen
        due = cache.full(slots)  # [layers, sequences]
        needed = [self._extensions.room_needed(seq) for seq in new]
        if max(needed, default=1) > 1:
            due |= cache.room(slots) < needed
        if self._asked_due and new:
            self._ask_due(due, new, slots)
        if not due.any():
            return
        budgets = self._budgets - cache.num_reserved[:, slots]
        due &= cache.num_candidates(slots) > budgets
        due &= np.array([seq.finish_reason is None for seq in new])
        if not due.any():
            return
        # From here on only about these: in most steps they are few of many.
        chosen = np.flatnonzero(due.any(axis=0))
        new = [new[index] for index in chosen.tolist()]
        slots = [seq.slot for seq in new]
        due, budgets = due[:, chosen], budgets[:, chosen]
        for seq in new:
            self.note_peak(seq)
        places = [(layer_idx, slots[index]) for layer_idx, index in np.argwhere(due).tolist()]
        cache.drop_unseen(places, self._make_rows)
        due &= cache.num_candidates(slots) > budgets
        for one in self._extensions:
            one.before_eviction(new, due)
        for index in np.flatnonzero(due.any(axis=0)).tolist():
            new[index].compactions += 1
        before = cache.rows[:, slots]
        self.compact(
            DueSlot(layer_idx, new[index], self._stacks[layer_idx], int(budget))
            for (layer_idx, index), budget in zip(
                np.argwhere(due).tolist(), budgets[due].tolist(), strict=True
            )
        )
        evicted = before - cache.rows[:, slots]
        self.num_compactions += int(np.count_nonzero(evicted))
        for seq, num_rows, in_layers in zip(new, evicted.T, due.T, strict=True):
            seq.rows_evicted += int(num_rows.sum())
            # Its newest token, which it has not seen, is not read yet.
            if in_layers.any() and seq.finish_reason is None and seq.num_tokens == seq.looked_at:
                self._ahead[seq] = num_rows

    def compact(self, due: abc.Iterable[DueSlot]) -> None:
        """Compact slots.

        Args:
            due: Slots that are due, in the order of layers. Those within the budget already, and
                those whose sequence has ended, are left alone.

        Raises:
            HookError: If a policy raises.
            HookResultError: If a policy's answer breaks the contract.
        """
        due = list(due)
        if not due:
            return
        layers, slots = [one.layer_idx for one in due], [one.slot for one in due]
        candidates = self._cache.num_candidates(slice(None))[layers, slots].tolist()
        fullest = self._cache.fullest(layers, slots).tolist()
        seq_len = self._cache.seq_len[slots].tolist()
        treated: dict[int, tuple[object, int]] = {}  # of each layer
        groups: dict[tuple[int, tuple[object, ...]], list[list[DueSlot]]] = defaultdict(list)
        for one, num_rows, most, seen in zip(due, candidates, fullest, seq_len, strict=True):
            if num_rows > one.budget:
                if one.layer_idx not in treated:
                    treated[one.layer_idx] = self._call_key(one), one.stack.window_size
                key, window_size = treated[one.layer_idx]
                # Hooks see no padding: sequences with equally many rows and stored queries are
                # compacted together.
                alike = num_rows, min(seen, window_size), self._extensions.together(one)
                group = groups[most, (key, one.budget, *alike)]
                if group and group[-1][0].layer_idx == one.layer_idx:
                    group[-1].append(one)
                else:
                    group.append([one])
        for (most, _), group in groups.items():
            for call in self._calls(group, most):
                self._compact(call)

    def take_checks(self) -> Unsettled | None:
        """The answers whose values were not checked at once; ``None``: there are none.

        They are settled where the tokens of the step are read that follows, before these are
        appended: those of a sequence whose rows were chosen wrongly are of no meaning.
        """
        if not self._late:
            return None
        late, self._late = self._late, []
        return Unsettled(late)

    def settle(self) -> None:
        """Check these answers now; waits for the device.

        Raises:
            HookResultError: If a policy's answer breaks the contract.
        """
        if (checks := self.take_checks()) is not None:
            checks.settle()

    def take_back(self) -> None:
        """Count nothing of the last eviction for sequences that turn out to have ended before it.

        So it is where their tokens are read after it, see `Scheduler.runs_ahead`. The rows are of
        slots that are emptied next.
        """
        for seq, num_rows in self._ahead.items():
            if seq.finish_reason is not None:
                seq.compactions -= 1
                seq.rows_evicted -= int(num_rows.sum())
                self.num_compactions -= int(np.count_nonzero(num_rows))
        self._ahead = {}

    def note_peak(self, seq: Sequence) -> None:
        """Update the peaks of a sequence, of the rows in its slot.

        Rows only grow between compactions: this is needed before each, and at the end.
        """
        rows = np.minimum(self._cache.rows[:, seq.slot], self._cache.capacity)
        seq.peak_rows = max(seq.peak_rows, int(rows.max()))
        held_bytes = int(rows @ self._cache.row_bytes) + self._cache.state_bytes
        seq.peak_bytes = max(seq.peak_bytes, held_bytes)
        seq.full_bytes = self._cache.full_bytes(seq.slot)

    # What is due

    def _ask_due(
        self, due: np.ndarray, sequences: abc.Sequence[Sequence], slots: list[int]
    ) -> None:
        """Add what policies want compacted, ``[layers, B]``, of sequences whose prompt is in."""
        seq_len = self._cache.seq_len[slots]
        prompt_len = np.array(
            [seq.prompt_len(seen) for seq, seen in zip(sequences, seq_len.tolist(), strict=True)]
        )
        asked = np.flatnonzero(seq_len >= prompt_len)
        if not asked.size:
            return
        sequences = [sequences[index] for index in asked.tolist()]
        seq_len, prompt_len = seq_len[asked], prompt_len[asked]
        candidates = self._cache.num_candidates([seq.slot for seq in sequences])
        answers: dict[object, Tensor | None] = {}
        for layer_idx in self._asked_due:
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
            if all(seq.finish_reason is not None for seq in sequences):
                return  # a policy has failed: there is nobody left to ask about
            answer = answers[key]
            if answer is not None:
                due[layer_idx, asked] |= answer.numpy()

    # Which slots are asked about together

    def _call_key(self, due: DueSlot) -> object:
        """What the slots have in common that hooks are asked about together."""
        if not due.stack.folds:
            return due.layer_idx
        layer = self._cache.layers[due.layer_idx]
        alike = layer.softmax.softcap, id(layer.softmax.sinks)
        return id(layer.arena), id(due.stack), alike

    def _calls(
        self, layers: list[list[DueSlot]], num_rows: int
    ) -> abc.Iterator[list[list[DueSlot]]]:
        """Divide layers, so that no call is too large; a head has so many rows."""
        row_bytes = self._cache.layers[layers[0][0].layer_idx].shape.row_bytes
        most = self.call_bytes // (num_rows * row_bytes)
        call: list[list[DueSlot]] = []
        size = 0
        for layer in layers:
            if call and size + len(layer) > most:
                yield call
                call, size = [], 0
            call.append(layer)
            size += len(layer)
        yield call

    # A call of the hooks

    def _compact(self, layers: list[list[DueSlot]]) -> None:
        """Compact slots, layer by layer if the layers together fail."""
        layers = [going for layer in layers if (going := _going_on(layer))]
        if len(layers) > 1 and self._compact_together(layers):
            return
        for layer in layers:
            self._compact_layer(_going_on(layer))

    def _compact_layer(self, due: list[DueSlot], keep: Tensor | None = None) -> None:
        """Compact slots of one layer; ``keep``: the rows that stay, if they are chosen already."""
        if not due:
            return
        one = self._compaction(due)
        one.keep = keep
        names = due[0].stack.tracks if len(due) > 1 else ()
        tracks = {name: one.rows.track(name).clone() for name in names}
        with self._covering(due, one):
            if keep is None:
                self._choose(one)
            self._evict(one)
            return
        going = _going_on(due)  # the model has failed for others of the call
        if going and one.rows.kept is not None:
            return  # what is stored of these is right, and cannot be undone
        self._undo(one, tracks if going else {})
        self._compact_layer(going, None if keep is None else keep[_places(going, due)])

    def _compact_together(self, layers: list[list[DueSlot]]) -> bool:
        """Compact slots of several layers; if a policy fails to choose, nothing, and false."""
        due = list(chain.from_iterable(layers))
        one = self._compaction(due)
        tracks = {name: one.rows.track(name).clone() for name in due[0].stack.tracks}
        try:
            keep = self._choose(one)
        except HookError:
            if not self._repeats:
                raise
            self._undo(one, tracks)
            return False
        if not due[0].stack.implements("evict"):
            self._evict(one)
            return True
        # A policy that stores rows itself has changed them when it fails: ask layer by layer.
        for layer, kept in zip(layers, keep.split([len(layer) for layer in layers]), strict=True):
            chosen = _going_on(layer)
            own = kept if chosen == layer else kept[_places(chosen, layer)]
            self._compact_layer(chosen, own)
        return True

    def _undo(self, one: Compaction, tracks: abc.Mapping[str, Tensor]) -> None:
        """Forget a call that has failed, which may have changed tracks."""
        for name, numbers in tracks.items():
            one.rows.set_track(name, numbers)
        if one.late is not None:
            self._late.remove(one.late)

    def _compaction(self, due: list[DueSlot]) -> Compaction:
        rows = self._make_rows(
            self._cache, [one.layer_idx for one in due], [one.slot for one in due]
        )
        rows.budget = due[0].budget
        return Compaction(
            due, rows, self._late_checks(due), arguments=self._extensions.arguments(due)
        )

    def _late_checks(self, due: list[DueSlot]) -> LateChecks | None:
        """Keeps the answers to hook calls for these slots; ``None``: they are checked at once."""
        if not self.defers or due[0].stack.is_recorded:
            return None
        self._late.append(LateChecks(partial(self._concerned, due)))
        return self._late[-1]

    def _concerned(self, due: list[DueSlot]) -> abc.Iterator[Concerned]:
        """The layers of a call, each with its slots."""
        start = 0
        for layer_idx, slots in groupby(due, key=lambda one: one.layer_idx):
            layer = list(slots)
            entries = slice(start, start + len(layer))
            yield Concerned(layer_idx, entries, partial(self._covering, layer))
            start += len(layer)

    @contextmanager
    def _covering(self, due: list[DueSlot], call: Compaction | None = None) -> abc.Iterator[None]:
        """Call hooks for slots in a block, which ends where one fails.

        What policies make of NaN is no failure of theirs if it is the model's own: then the
        sequences whose logits show it end, as they would at their next token. If rows were stored
        by then, those of the others must be right, since nobody is asked again.

        Args:
            due: The slots.
            call: The call of the hooks, if it is under way.
        """
        sequences = [one.sequence for one in due]
        with self._errors.covering(sequences):
            try:
                yield
            except HookError as error:
                lost = [seq for seq in sequences if seq.is_lost]
                if not lost or (call is not None and not _spares_others(call, error)):
                    raise
                for seq in lost:
                    seq.fail_without_token()

    def _choose(self, one: Compaction) -> Tensor:
        """Ask which rows stay."""
        first, positions = one.due[0], one.rows.positions
        shared = self._shared(one) | {"positions": positions, "budget": first.budget}
        with self._timings.time("score_s", positions.device):
            scores = final_scores(
                one.rows,
                first.stack,
                first.layer_idx,
                late=one.late,
                bound=self._bound[first.layer_idx],
                supplied=one.arguments,
                is_image=self._is_image(one),
                **shared,
            )
        with self._timings.time("select_s", positions.device):
            heads = "own" if one.rows.absent is None else "shared"
            one.keep = first.stack.select(
                first.layer_idx, one.late, scores=scores, heads=heads, **shared
            )
        return one.keep

    def _is_image(self, one: Compaction) -> Tensor | None:
        """Which rows belong to images, if a policy asks for it."""
        if "is_image" not in one.due[0].stack.reads:
            return None
        return self._image_rows(one.sequences, one.rows.positions)

    def _evict(self, one: Compaction) -> None:
        """Have the rows leave that were not chosen."""
        first = one.due[0]
        assert one.keep is not None, "they were chosen"
        for extension in self._extensions:
            extension.selected(one)
        with self._timings.time("compaction_s", one.keep.device):
            first.stack.evict(one.rows, one.keep, first.layer_idx, one.memory, one.late)

    def _shared(self, one: Compaction) -> dict[str, Any]:
        """Arguments of `protect`, `score` and `select` that come from the sequences."""
        prompt_len = None
        if "prompt_len" in one.due[0].stack.reads:
            seen = self._cache.seq_len[[due.slot for due in one.due]].tolist()
            pairs = zip(one.sequences, seen, strict=True)
            prompt_len = torch.tensor([seq.prompt_len(num) for seq, num in pairs])
        return {"prompt_len": prompt_len, "memory": one.memory}


def _going_on(due: abc.Sequence[DueSlot]) -> list[DueSlot]:
    """Those whose sequence has not ended: a policy may have failed for it in a layer before."""
    return [one for one in due if one.sequence.finish_reason is None]


def _places(some: abc.Iterable[DueSlot], due: list[DueSlot]) -> list[int]:
    """Where some of the slots of a call are in its batch axis."""
    return [due.index(one) for one in some]


def _spares_others(one: Compaction, error: HookError) -> bool:
    """Whether a failure changes nothing for those of a call for whom the model has not failed.

    So it is before rows are stored. Then, the policy must have answered, and rightly for these.
    """
    others = [index for index, seq in enumerate(one.sequences) if not seq.is_lost]
    if one.rows.kept is None or not others:
        return True
    assert one.keep is not None, "they were chosen"
    has_answered = isinstance(error, HookResultError)
    return has_answered and evict_check(one.rows, one.keep, others)(True) is None
