"""Staging: rows beside the slabs, for prompts that enter in more tokens than a slot has room for.

While its prompt enters, a slot may hold more rows than its slab: up to the ``prefill_buffer`` of
the plan behind the budget. The first are those of the slab; the others lie in the staging area,
which all slots share. It has *lanes*, each for one prompt in every layer. A slot is due when its
lane is full, and when its prompt is in and does not fit into its slab; the rows that stay are then
those of the slab again. As many sequences with such prompts are admitted as there are lanes, so a
lane is there when it is needed.
"""

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.base import Compact
from kvpolicy.attention.choose import backend_for
from kvpolicy.attention.visible import Visible
from kvpolicy.cache.arena import Arena, SlabArena, index_on
from kvpolicy.cache.contents import LayerContents
from kvpolicy.cache.counts import Counts
from kvpolicy.cache.layouts.base import (
    ALL,
    Around,
    LayerCache,
    Layout,
    OpenRows,
    OpenSlabs,
    RowLayout,
)
from kvpolicy.cache.layouts.even import EvenSpan, add_to, causal
from kvpolicy.cache.layouts.places import Places, new_places
from kvpolicy.cache.layouts.span import Columns, Entries, Kept, Span, row_index, taken
from kvpolicy.cache.layouts.tokens import NewTokens
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.devices import upload

# Makes the kept rows of a slab the first of their entries; see `kvpolicy.cache.layouts.even`.
_Move = Callable[[Tensor, int | None], int]


class StagedArena(SlabArena):
    """Slabs, and the staging area of their layers.

    Attributes:
        staging: The staging area: lanes in place of slots.
    """

    def __init__(
        self,
        shape: LayerShape,
        slab: Slab,
        num_layers: int,
        num_slots: int,
    ) -> None:
        super().__init__(shape, slab, num_layers, num_slots)
        assert slab.staging is not None, "these layers have a staging area"
        self.staging = SlabArena(shape, slab.of_lanes, num_layers, slab.staging.num_prompts)
        self._areas = _areas(self.slabs, self.staging.slabs)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return super().num_bytes + self.staging.num_bytes

    def beside(self, slab: Tensor) -> Tensor:
        """The staging area of all layers for one of their slabs."""
        return self._areas[id(slab)]


class StagedLayer(LayerCache):
    """The slabs of a layer, and its lanes."""

    arena: StagedArena

    def __init__(self, index: int, arena: StagedArena, place: int, layout: RowLayout) -> None:
        super().__init__(index, arena, place, layout)
        lanes = LayerCache(index, arena.staging, place, layout)
        self._areas = _areas(self.slabs, lanes.slabs)

    def beside(self, slab: Tensor) -> Tensor:
        """The staging area of one of its slabs, ``[lanes, H_kv, R, ...]``."""
        return self._areas[id(slab)]


def _areas(slabs: Sequence[Tensor], beside: Sequence[Tensor]) -> dict[int, Tensor]:
    """Staging areas by the ``id`` of the slabs that they belong to, which live as long."""
    return {id(own): area for own, area in zip(slabs, beside, strict=True)}


class Staged(Around):
    """Even slabs, with rows of prompts beside them."""

    _num_lanes: int
    _lane_rows: np.ndarray  # rows of a lane in each layer, [n, 1]

    def __init__(self, inner: RowLayout) -> None:
        super().__init__(inner)
        self._lane = np.zeros_like(self.counts.seq_len)  # of each slot, from 1 on; 0: none

    @property
    def numbers(self) -> list[np.ndarray]:
        """What the layout knows of the slots."""
        return [*super().numbers, self._lane]

    def new_arena(self, shape: LayerShape, slab: Slab, num_layers: int, num_slots: int) -> Arena:
        """Allocate slabs and the staging area."""
        return StagedArena(shape, slab, num_layers, num_slots)

    def new_layer(self, index: int, arena: Arena, place: int) -> LayerCache:
        """The slabs and the lanes of a layer."""
        assert isinstance(arena, StagedArena)
        return StagedLayer(index, arena, place, self)

    def widen_rows(self, old: LayerCache, new: LayerCache) -> None:
        """Copy rows to larger slabs."""
        assert not self._overflows.any(), "no cache grows while prompts enter"
        super().widen_rows(old, new)

    def take(self, source: Layout, slots: Sequence[int]) -> None:
        """Take over what another cache knows of its slots."""
        assert isinstance(source, Staged)
        assert not source._overflows.any(), "no cache is copied while prompts enter"
        super().take(source, slots)

    def attach(self, layers: Sequence[LayerCache]) -> None:
        """Take its layers, which say how many rows lie beside a slab."""
        super().attach(layers)
        areas = [area for layer in layers if (area := layer.slab.staging) is not None]
        self._lane_rows = np.array([area.rows for area in areas])[:, None]
        self._num_lanes = areas[0].num_prompts
        self._arenas = list({id(layer.arena): _staged(layer).arena for layer in layers}.values())

    # Counts

    def admits(self, num_prompt: int) -> bool:
        """Whether there is a lane for it, if it may need one."""
        counts, least = self.counts, int(self._capacity.min())
        enters = (counts.num_prompt > least) & (counts.seq_len < counts.num_prompt)
        num_promised = np.count_nonzero(enters | self._overflows)
        return num_prompt <= least or bool(num_promised < self._num_lanes)

    def enter_together(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        """With rows beside a slab, as many as there are lanes: each attends to as large a copy."""
        rows = self.counts.rows[self.own][:, slots] + lengths
        return len(slots) <= self._num_lanes or not bool((rows > self._capacity).any())

    def reserve(self, tokens: NewTokens) -> object:
        """Take the lanes that new tokens need in any layer."""
        return self._lanes_for(tokens).tobytes()

    def room(self, slots: Sequence[int]) -> np.ndarray:
        """Free rows of the slab, and of a lane while a prompt enters."""
        enters = self.counts.seq_len[slots] < self.counts.num_prompt[slots]
        room: np.ndarray = super().room(slots) + np.where(enters, self._lane_rows, 0)
        return room

    def full(self, slots: Sequence[int]) -> np.ndarray:
        """Those without room."""
        full: np.ndarray = self.room(slots) <= 0
        return full

    @property
    def _capacity(self) -> np.ndarray:
        """Rows of a slab in each layer, ``[n, 1]``."""
        capacity: np.ndarray = self.counts.capacity[self.own][:, None]
        return capacity

    @property
    def _overflows(self) -> np.ndarray:
        """Which slots have rows beside their slab in some layer, bool ``[S]``."""
        beside: np.ndarray = self.counts.rows[self.own] - self._capacity
        overflows: np.ndarray = beside.max(axis=0) > 0
        return overflows

    # Rows

    def all_rows(self, layer: LayerCache, layers: Sequence[int], slots: Sequence[int]) -> Span:
        """The rows of the slabs and those beside them."""
        num_rows = int(self.counts.rows[layers[0], slots[0]])
        if num_rows <= layer.slab.capacity:
            return self.inner.all_rows(layer, layers, slots)
        return self._span(layer, layers, slots, num_rows)

    def place(self, layer: LayerCache, slot: int, held: LayerContents) -> Span:
        """The slab, and a lane for what is more."""
        if held.num_rows <= layer.slab.capacity:
            return self.inner.place(layer, slot, held)
        self._take_lanes(np.array([slot]))
        return self._span(layer, [layer.index], [slot], held.num_rows)

    def open(self, layer: LayerCache, tokens: NewTokens) -> OpenRows:
        """Begin a forward."""
        before = self.counts.rows[layer.index, tokens.slots]
        key = "staged", layer.shape.device, layer.slab.capacity, before.tobytes()
        where = tokens.shared(key, lambda: self._where(layer, tokens, before))
        if where is None:
            return self.inner.open(layer, tokens)
        return OpenStaged(_staged(layer), tokens, where, self.counts)

    def columns(self, layer: LayerCache, slots: Sequence[int]) -> Columns:
        """The rows of the slabs, and a copy of all if some lie beside them."""
        rows = self.counts.rows[layer.index, list(slots)]
        num_beside = np.maximum(rows - layer.slab.capacity, 0)
        if not num_beside.any():
            return self.inner.columns(layer, slots)
        device, staged = layer.shape.device, _staged(layer)
        beside, served = Beside(self._lanes(slots), num_beside, device), index_on(device, slots)
        present = upload(np.arange(int(rows.max())) < rows[:, None], device)

        def read(slab: Tensor) -> Tensor:
            return beside.joined(slab[served], staged.beside(slab))

        return Columns(read, present[:, None])

    def _span(
        self, layer: LayerCache, layers: Sequence[int], slots: Sequence[int], num_rows: int
    ) -> Span:
        staged = _staged(layer)
        first = np.array([self._firsts[one] for one in layers]) // len(self._lane)
        lanes = first * self._num_lanes + self._lanes(slots)
        return StagedSpan(self.entries(layer, layers, slots), lanes, staged.arena, 0, num_rows)

    def _where(
        self, layer: LayerCache, tokens: NewTokens, before: np.ndarray
    ) -> "WhereStaged | None":
        """Where new rows go behind so many, ``[B]``; ``None``: all of them go to the slabs."""
        capacity, device = layer.slab.capacity, layer.shape.device
        num_beside = np.maximum(before + tokens.lengths - capacity, 0)
        if not num_beside.any():
            return None
        lanes = self._lanes_for(tokens)
        has_lane = np.flatnonzero(num_beside)
        return WhereStaged(
            new_places(tokens, tokens.slots, before, device, end=capacity),
            new_places(tokens, lanes, before, device, first=capacity),
            Beside(lanes, num_beside, device),
            index_on(device, has_lane),
            index_on(device, lanes[has_lane]),
            causal(tokens, before, device),
        )

    def _lanes_for(self, tokens: NewTokens) -> np.ndarray:
        """The lanes of the slots of a forward, which takes those that it needs in any layer."""

        def take() -> np.ndarray:
            slots = tokens.slots
            rows = self.counts.rows[self.own][:, slots] + tokens.lengths
            self._take_lanes(slots[(rows > self._capacity).any(axis=0)], slots)
            return self._lanes(slots)

        return tokens.shared(("lanes", id(self)), take)

    def _take_lanes(self, needing: np.ndarray, staying: Sequence[int] | np.ndarray = ()) -> None:
        """Give lanes to slots that need them and have none; ``staying`` keep those they have."""
        lane, held = self._lane, self._overflows
        held[needing] = True  # rows of a forward are not counted yet
        held[list(staying)] = True
        lane[~held] = 0
        free = sorted(set(range(1, self._num_lanes + 1)).difference(lane.tolist()))
        for slot in needing:
            if not lane[slot]:
                lane[slot] = free.pop(0)
                self._empty(int(lane[slot]) - 1)

    def _empty(self, lane: int) -> None:
        """Empty the tracks of a lane: who had it may have left without a compaction."""
        for arena in self._arenas:
            for track in arena.staging.tracks.values():
                arena.staging.of_slot(track, lane).zero_()

    def _lanes(self, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """The lanes of slots, ``[B]``; those of slots without one are of no meaning."""
        lanes: np.ndarray = np.maximum(self._lane[np.asarray(slots)] - 1, 0)
        return lanes


def _staged(layer: LayerCache) -> StagedLayer:
    assert isinstance(layer, StagedLayer), "this layer has a staging area"
    return layer


class Beside:
    """Where rows of some entries lie beside their slabs.

    Attributes:
        lanes: Index of their places in a staging area; of no meaning without rows there.
        most: Rows there of the entry that has most.
    """

    def __init__(self, lanes: np.ndarray, num_rows: np.ndarray, device: torch.device) -> None:
        """Take the place and the number of rows of each, ``[B]``."""
        self.lanes, self.most = index_on(device, lanes), int(num_rows.max())
        self._absent: Tensor | None = None  # where an entry has fewer, [B, 1, most]
        if (num_rows < self.most).any():
            absent = np.arange(self.most) >= num_rows[:, None]
            self._absent = upload(absent[:, None], device)

    def joined(self, own: Tensor, area: Tensor, empty: int = 0) -> Tensor:
        """Rows of slabs followed by those beside them, a copy, ``[B, H_kv, T, ...]``.

        Args:
            own: The slabs, ``[B, H_kv, capacity, ...]``.
            area: The staging area.
            empty: Takes the places of rows where an entry has fewer there.
        """
        rows = torch.cat([own, area[self.lanes, :, : self.most]], dim=2)
        if self._absent is not None:
            absent = self._absent.view(*self._absent.shape, *[1] * (rows.dim() - 3))
            rows[:, :, own.shape[2] :].masked_fill_(absent, empty)
        return rows


@attrs.frozen(eq=False)
class WhereStaged:
    """Where the new rows of a forward go in layers that hold equally many.

    Attributes:
        in_slabs: Those that have a place in a slab.
        in_lanes: The others.
        beside: All rows beside the slabs, with the new ones.
        entries: Index of the sequences that have some there.
        lanes: Index of the lanes of these.
        visible: Which rows each query sees.
    """

    in_slabs: Places
    in_lanes: Places
    beside: Beside
    entries: slice | Tensor
    lanes: slice | Tensor
    visible: Visible


class StagedSpan(Span):
    """Equally many rows of each entry, the last of them beside its slab."""

    def __init__(
        self, entries: Entries, lanes: np.ndarray, arena: StagedArena, first: int, end: int
    ) -> None:
        """Take entries, the places of their lanes, and which rows of each."""
        self.entries, self.num_rows = entries, end - first
        self._arena, self._first, self._capacity = arena, first, arena.slab.capacity
        self._lanes, device = lanes, arena.shape.device
        self._beside = Beside(lanes, np.full(len(lanes), end - self._capacity), device)

    def part(self, first: int, end: int) -> Span:
        """Some of these rows."""
        if self._first + end <= self._capacity:
            return EvenSpan(self.entries, end - first, self._first + first)
        where = self._first + first, self._first + end
        return StagedSpan(self.entries, self._lanes, self._arena, *where)

    def read(self, slab: Tensor) -> Tensor:
        """These rows, a copy."""
        own, area = self.entries.of(slab), self._arena.beside(slab)
        return self._beside.joined(own, area)[:, :, self._first :]

    def write(self, slab: Tensor, rows: Tensor) -> None:
        """Replace these rows."""
        num_own = max(self._capacity - self._first, 0)
        slab[self.entries.index, :, self._first : self._first + num_own] = rows[:, :, :num_own]
        first = max(self._first - self._capacity, 0)
        places = slice(first, first + self.num_rows - num_own)
        area = self._arena.beside(slab)
        area[self._beside.lanes, :, places] = rows[:, :, num_own:].to(slab.dtype)

    def keep(
        self,
        arena: SlabArena,
        keep: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        budget: int | None,
    ) -> Kept:
        """Make the chosen rows the first of the slabs; ``keep`` is ``[B, H_kv, K]``."""
        assert isinstance(arena, StagedArena), "it has these rows"
        # An index that is wrong, which may be known only later, must not reach other slots.
        within = keep.clamp(0, self.num_rows - 1)
        compact = backend_for(keep.device, arena.shape.dtype).compact
        move = self._by_copy(within) if compact is None else self._in_place(within, compact)
        store, index, most = arena.store, self.entries.index, 0
        for stored, replacement in ((store.keys, keys), (store.values, values)):
            if replacement is None:
                most = max(most, move(stored.slab, None))
            else:
                rows = stored.encode(replacement)
                stored.slab[index, :, : keep.shape[2]] = rows
                most = max(most, rows.nbytes)
        most = max(most, move(arena.positions, -1))
        for track in arena.tracks.values():
            most = max(most, move(track, 0))
            _empty(arena.beside(track), self._beside.lanes)
        return Kept(keep.shape[2], most)

    def _in_place(self, keep: Tensor, compact: Compact) -> _Move:
        """Moves rows within their slab, and from their lane."""
        places, lanes = self.entries.places, upload(self._lanes, keep.device)
        num_kept = keep.new_full(keep.shape[:2], keep.shape[2])
        num_rows = torch.full_like(num_kept, self.num_rows)

        def move(slab: Tensor, empty: int | None) -> int:
            area = self._arena.beside(slab)
            compact(slab, keep, places, num_kept, num_rows, empty or 0, beside=area, lanes=lanes)
            return 0

        return move

    def _by_copy(self, keep: Tensor) -> _Move:
        """Moves rows by way of a copy."""
        arena, capacity, num_kept = self._arena, self._capacity, keep.shape[2]
        is_beside = keep >= capacity
        in_slabs = row_index(self.entries.places, keep.clamp(max=capacity - 1), arena.positions)
        lanes, area = upload(self._lanes, keep.device), arena.staging.positions
        in_lanes = row_index(lanes, (keep - capacity).clamp(min=0), area)
        index = self.entries.index
        # As many entries at a time as take no more than the copies of a forward of all lanes.
        row_bytes = sum(slab[0, :, :1].nbytes for slab in arena.store.slabs)
        largest = arena.staging.num_slots * self.num_rows * row_bytes

        def put(slab: Tensor, rows: Tensor, piece: slice) -> None:
            if isinstance(index, slice):
                slab[index][piece, :, :num_kept] = rows
            else:
                slab[index[piece], :, :num_kept] = rows

        def move(slab: Tensor, empty: int | None) -> int:
            area, most = arena.beside(slab), 0
            num = max(largest // max(2 * num_kept * slab[0, :, :1].nbytes, 1), 1)
            for start in range(0, len(keep), num):
                piece = slice(start, start + num)
                rows, others = taken(slab, in_slabs[piece]), taken(area, in_lanes[piece])
                chosen = is_beside[piece].view(*rows.shape[:3], *[1] * (rows.dim() - 3))
                put(slab, torch.where(chosen, others, rows, out=rows), piece)
                most = max(most, rows.nbytes + others.nbytes)
            if empty is not None:
                slab[index, :, num_kept:] = empty
            return most

        return move


def _empty(areas: Tensor, lanes: slice | Tensor) -> None:
    """Empty lanes of tracks: new rows have the number 0."""
    if isinstance(lanes, slice):
        areas[lanes].zero_()
    else:
        areas.index_fill_(0, lanes, 0)


class OpenStaged(OpenSlabs):
    """New rows in the free places of slabs, then in those of lanes; attention gets copies."""

    repeats = True

    layer: StagedLayer

    def __init__(
        self, layer: StagedLayer, tokens: NewTokens, where: WhereStaged, counts: Counts
    ) -> None:
        """Begin a forward.

        Args:
            layer: The layer.
            tokens: The new tokens.
            where: Where they go.
            counts: Those of the cache.
        """
        super().__init__(layer, tokens)
        self._where, self._counts, self.visible = where, counts, where.visible
        self._served = tokens.served_on(layer.shape.device)

    def store(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new rows behind those held; returns copies."""
        rows = super().store(keys, values)
        self._counts.note_copy(sum(one.nbytes for one in rows))
        return rows

    def put(self, slab: Tensor, new: Tensor | int) -> None:
        """Write the new rows of a slab and of its lanes, or a number."""
        self._where.in_slabs.put(slab, new)
        self._where.in_lanes.put(self.layer.beside(slab), new)

    def put_each(self, slab: Tensor, new: Tensor) -> None:
        """Write the new rows of a slab and of its lanes, without pads."""
        self._where.in_slabs.put_each(slab, new)
        self._where.in_lanes.put_each(self.layer.beside(slab), new)

    def read(self, slab: Tensor) -> Tensor:
        """The rows of a slab and of its lanes, a copy."""
        return self._joined(slab, 0)

    @property
    def positions(self) -> Tensor:
        """Positions of the rows attended to; -1 where there is none."""
        return self._joined(self.layer.positions, -1)

    def add(self, track: Tensor, received: Tensor) -> None:
        """Add to the numbers of a track in slabs and lanes."""
        capacity, where = self.layer.slab.capacity, self._where
        add_to(track, (self._served, ALL, ALL), received[:, :, :capacity])
        places = slice(received.shape[2] - capacity)
        area = self.layer.beside(track)
        add_to(area, (where.lanes, ALL, places), received[where.entries, :, capacity:])

    def _joined(self, slab: Tensor, empty: int) -> Tensor:
        return self._where.beside.joined(slab[self._served], self.layer.beside(slab), empty)
