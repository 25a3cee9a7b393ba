"""Staging: rows beside the slabs, for prompts that enter in more tokens than a slot has room for.

While its prompt enters, a slot may hold more rows than its slab: up to the ``prefill_buffer`` of
the plan behind the budget. The first are those of the slab; the others lie in the staging area,
which all slots share. It has *lanes*, each for one prompt in every layer. A slot is due when its
lane is full, and when its prompt is in and does not fit into its slab; the rows that stay are then
those of the slab again. As many sequences with such prompts are admitted as there are lanes, so a
lane is there when it is needed.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.arena import Arena, SlabArena, slot_index
from kvpolicy.cache.contents import LayerContents
from kvpolicy.cache.counts import Counts
from kvpolicy.cache.layouts.base import Around, LayerCache, Layout, OpenRows, RowLayout
from kvpolicy.cache.layouts.even import EvenSpan, OpenEven
from kvpolicy.cache.layouts.span import Columns, Entries, Kept, Span, taken
from kvpolicy.cache.layouts.tokens import NewTokens
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.devices import upload


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

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return super().num_bytes + self.staging.num_bytes

    def beside(self, slab: Tensor, layer: LayerCache | None = None) -> Tensor:
        """The staging area of all layers for one of their slabs, or for that of a layer."""
        slabs = self.slabs if layer is None else layer.slabs
        return next(
            lanes for own, lanes in zip(slabs, self.staging.slabs, strict=True) if own is slab
        )


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
        self._take_lanes([slot], [True])
        return self._span(layer, [layer.index], [slot], held.num_rows)

    def open(self, layer: LayerCache, tokens: NewTokens) -> OpenRows:
        """Begin a forward."""
        before = self.counts.rows[layer.index, tokens.slots]
        num_beside = np.maximum(before + tokens.lengths - layer.slab.capacity, 0)
        if not num_beside.any():
            return self.inner.open(layer, tokens)
        self._take_lanes(tokens.slots, num_beside > 0)
        lanes = self._lanes([layer.index] * len(before), tokens.slots)
        return OpenStaged(layer, tokens, before, Beside(lanes, num_beside), self.counts)

    def columns(self, layer: LayerCache, slots: Sequence[int]) -> Columns:
        """The rows of the slabs, and a copy of all if some lie beside them."""
        rows = self.counts.rows[layer.index, list(slots)]
        num_beside = np.maximum(rows - layer.slab.capacity, 0)
        if not num_beside.any():
            return self.inner.columns(layer, slots)
        lanes = self._lanes([layer.index] * len(rows), slots)
        beside, arena = Beside(lanes, num_beside), _arena_of(layer)
        present = upload(np.arange(int(rows.max())) < rows[:, None], layer.shape.device)

        def read(slab: Tensor) -> Tensor:
            return beside.joined(slab[slot_index(slots)], arena.beside(slab, layer))

        return Columns(read, present[:, None])

    def _span(
        self, layer: LayerCache, layers: Sequence[int], slots: Sequence[int], num_rows: int
    ) -> Span:
        entries, lanes = self.entries(layer, layers, slots), self._lanes(layers, slots)
        return StagedSpan(entries, lanes, _arena_of(layer), 0, num_rows)

    def _take_lanes(
        self, slots: Sequence[int] | np.ndarray, needed: Sequence[bool] | np.ndarray
    ) -> None:
        """Give lanes to those slots of one forward, ``[B]``, that need them and have none."""
        chosen, lane = np.asarray(slots), self._lane
        held = self._overflows
        held[chosen] = True  # rows of a forward are not counted yet
        lane[~held] = 0
        free = sorted(set(range(1, self._num_lanes + 1)).difference(lane.tolist()))
        for slot in chosen[needed]:
            if not lane[slot]:
                lane[slot] = free.pop(0)

    def _lanes(self, layers: Sequence[int], slots: Sequence[int] | np.ndarray) -> list[int]:
        """Places of the lanes of slots in the staging area, each in a layer of an arena, ``[B]``.

        Those of slots without a lane are of no meaning.
        """
        first = np.array([self._firsts[one] for one in layers]) // len(self._lane)
        lanes = np.maximum(self._lane[np.asarray(slots)] - 1, 0)
        places: list[int] = (first * self._num_lanes + lanes).tolist()
        return places


def _arena_of(layer: LayerCache) -> StagedArena:
    assert isinstance(layer.arena, StagedArena), "this layer has a staging area"
    return layer.arena


@attrs.frozen(eq=False)
class Beside:
    """Where rows of some entries lie beside their slabs.

    Attributes:
        lanes: The place of each entry in the staging area, ``[B]``; of no meaning without rows.
        num_rows: How many rows it has there, ``[B]``.
    """

    lanes: list[int]
    num_rows: np.ndarray

    def of(self, piece: slice) -> "Beside":
        """Those of some of the entries."""
        return Beside(self.lanes[piece], self.num_rows[piece])

    def joined(self, own: Tensor, area: Tensor, empty: int = 0) -> Tensor:
        """Rows of slabs followed by those beside them, a copy, ``[B, H_kv, T, ...]``.

        Args:
            own: The slabs, ``[B, H_kv, capacity, ...]``.
            area: The staging area.
            empty: Takes the places of rows where an entry has fewer there.
        """
        (num, heads, capacity, *rest), most = own.shape, int(self.num_rows.max())
        rows = own.new_empty(num, heads, capacity + most, *rest)
        rows[:, :, :capacity] = own
        staged = rows[:, :, capacity:]
        staged[:] = area[slot_index(self.lanes), :, :most]
        if (self.num_rows < most).any():
            absent = upload(np.arange(most) >= self.num_rows[:, None], own.device)
            staged.masked_fill_(absent[:, None, :, *[None] * len(rest)], empty)
        return rows


class StagedSpan(Span):
    """Equally many rows of each entry, the last of them beside its slab."""

    def __init__(
        self, entries: Entries, lanes: list[int], arena: StagedArena, first: int, end: int
    ) -> None:
        """Take entries, the places of their lanes, and which rows of each."""
        self.entries, self.num_rows = entries, end - first
        self._arena, self._first, self._capacity = arena, first, arena.slab.capacity
        self._beside = Beside(lanes, np.full(len(lanes), end - self._capacity))

    def part(self, first: int, end: int) -> Span:
        """Some of these rows."""
        if self._first + end <= self._capacity:
            return EvenSpan(self.entries, end - first, self._first + first)
        where = self._first + first, self._first + end
        return StagedSpan(self.entries, self._beside.lanes, self._arena, *where)

    def read(self, slab: Tensor) -> Tensor:
        """These rows, a copy."""
        return self._joined(slab, slice(None))

    def write(self, slab: Tensor, rows: Tensor) -> None:
        """Replace these rows."""
        num_own = max(self._capacity - self._first, 0)
        slab[self.entries.index, :, self._first : self._first + num_own] = rows[:, :, :num_own]
        first = max(self._first - self._capacity, 0)
        places = slice(first, first + self.num_rows - num_own)
        area, lanes = self._arena.beside(slab), slot_index(self._beside.lanes)
        area[lanes, :, places] = rows[:, :, num_own:].to(slab.dtype)

    def keep(
        self,
        arena: SlabArena,
        keep: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        budget: int | None,
    ) -> Kept:
        """Make the chosen rows the first of the slabs; ``keep`` is ``[B, H_kv, K]``."""
        # An index that is wrong, which may be known only later, must not reach other slots.
        within, num_kept = keep.clamp(0, self.num_rows - 1), keep.shape[2]
        # As many entries at a time as a layer has lanes: else several layers are one large copy.
        num, store, most = self._arena.staging.num_slots, arena.store, 0
        pieces = [slice(start, start + num) for start in range(0, len(keep), num)]

        def put(slab: Tensor, rows: Tensor, piece: slice) -> None:
            slab[self.entries.places[piece], :, :num_kept] = rows

        def move(slab: Tensor) -> int:
            most = 0
            for piece in pieces:
                whole, chosen = self._joined(slab, piece), within[piece]
                heads = torch.arange(chosen[..., 0].numel(), device=keep.device) * self.num_rows
                rows = taken(whole, chosen + heads.view(*chosen.shape[:2], 1))
                put(slab, rows, piece)
                most = max(most, whole.nbytes + rows.nbytes)
            return most

        for stored, replacement in ((store.keys, keys), (store.values, values)):
            if replacement is None:
                most = max(most, move(stored.slab))
            else:
                rows = stored.encode(replacement)
                put(stored.slab, rows, slice(None))
                most = max(most, rows.nbytes)
        for slab, empty in ((arena.positions, -1), *((one, 0) for one in arena.tracks.values())):
            most = max(most, move(slab))
            slab[self.entries.index, :, num_kept:] = empty
        return Kept(num_kept, most)

    def _joined(self, slab: Tensor, piece: slice) -> Tensor:
        """These rows of some of the entries."""
        own, area = slab[self.entries.places[piece]], self._arena.beside(slab)
        return self._beside.of(piece).joined(own, area)[:, :, self._first :]


class OpenStaged(OpenEven):
    """New rows in the free places of slabs, then in those of lanes; attention gets copies."""

    def __init__(
        self,
        layer: LayerCache,
        tokens: NewTokens,
        before: np.ndarray,
        beside: Beside,
        counts: Counts,
    ) -> None:
        """Begin a forward.

        Args:
            layer: The layer.
            tokens: The new tokens.
            before: Rows that the slots hold, ``[B]``.
            beside: The lanes of the slots, and how many rows they have with the new ones.
            counts: Those of the cache.
        """
        super().__init__(layer, tokens, before)
        self._arena, self._beside, self._counts = _arena_of(layer), beside, counts
        self._capacity = layer.slab.capacity
        sequences, _ = np.nonzero(tokens.is_real)
        rows = before[sequences] + tokens.token[tokens.is_real]
        is_own, lanes = rows < self._capacity, np.array(beside.lanes)[sequences]
        self._in_slabs = _places(is_own, tokens.slots[sequences], rows, layer)
        self._in_lanes = _places(~is_own, lanes, rows - self._capacity, layer)

    def store(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new rows behind those held; returns copies."""
        for track in self.layer.tracks.values():  # a lane has those of the rows before
            self.put(track, 0)
        rows = super().store(keys, values)
        self._counts.note_copy(sum(one.nbytes for one in rows))
        return rows

    def put(self, slab: Tensor, new: Tensor | int) -> None:
        """Write the new rows of a slab and of its lanes."""
        both = (slab, self._in_slabs), (self._area(slab), self._in_lanes)
        for target, (chosen, where, rows) in both:
            target[where, :, rows] = new if isinstance(new, int) else new[chosen]

    def read(self, slab: Tensor) -> Tensor:
        """The rows of a slab and of its lanes, a copy."""
        return self._beside.joined(slab[self.tokens.served], self._area(slab))

    @property
    def positions(self) -> Tensor:
        """Positions of the rows attended to; -1 where there is none."""
        slab = self.layer.positions
        return self._beside.joined(slab[self.tokens.served], self._area(slab), empty=-1)

    def add(self, track: Tensor, received: Tensor) -> None:
        """Add to the numbers of a track in slabs and lanes."""
        track[self.tokens.served] += received[:, :, : self._capacity]
        has_lane = np.flatnonzero(self._beside.num_rows)
        entries = upload(has_lane, track.device)
        lanes = upload(np.array(self._beside.lanes)[has_lane], track.device)
        places = slice(received.shape[2] - self._capacity)
        self._area(track)[lanes, :, places] += received[entries, :, self._capacity :]

    def _area(self, slab: Tensor) -> Tensor:
        return self._arena.beside(slab, self.layer)


def _places(
    is_chosen: np.ndarray, where: np.ndarray, rows: np.ndarray, layer: LayerCache
) -> tuple[Tensor, Tensor, Tensor]:
    """Which new rows go to some places, ``[M]``, their slots or lanes, and their rows there."""
    chosen = np.flatnonzero(is_chosen)
    numbers = np.stack([chosen, where[chosen], rows[chosen]])
    places, slots, of_slots = upload(numbers, layer.shape.device)
    return places, slots, of_slots
