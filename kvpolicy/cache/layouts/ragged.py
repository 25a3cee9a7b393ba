"""Ragged heads: the KV heads of a layer share its budget, and hold different numbers of rows.

Each head has a segment of the slot's slab, see `kvpolicy.cache.layouts.segments`. Hooks and
attention see rows in columns that are aligned on the right: the newest row of each head is in the
last one, and columns that a head has no row for come first. A policy answers which rows stay as a
mask, and the segments are packed again, side by side.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.visible import Visible
from kvpolicy.cache.arena import SlabArena, slot_index
from kvpolicy.cache.contents import LayerContents
from kvpolicy.cache.counts import Counts
from kvpolicy.cache.layouts.base import LayerCache, OpenRows, OpenSlabs, RowLayout
from kvpolicy.cache.layouts.segments import (
    even_bounds,
    packed_bounds,
    places_of,
    stretched,
)
from kvpolicy.cache.layouts.span import Columns, Entries, Kept, Span, taken
from kvpolicy.cache.layouts.tokens import NewTokens
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.devices import Download, upload


class Ragged(RowLayout):
    """Slabs that are pools of ``H_kv * capacity`` rows, in which heads have segments.

    Its *lead* is how many rows the fullest head of a slot holds more than `Counts.rows` says. It
    may be negative. Only the device knows it after a compaction; it is read when it is needed.
    """

    def __init__(self, counts: Counts) -> None:
        super().__init__(counts)
        self._lead = np.zeros_like(counts.rows)
        self._coming: list[tuple[Sequence[int], Sequence[int], Download]] = []

    def empty_tables(self, shape: LayerShape, slab: Slab) -> dict[str, Tensor]:
        """The bounds of the segments."""
        return {"bounds": even_bounds(shape.num_kv_heads, slab.capacity, shape.device)}

    def widen_rows(self, old: LayerCache, new: LayerCache) -> None:
        """Give every head as many more free rows."""
        by = new.slab.capacity - old.slab.capacity
        bounds = bounds_of(old)
        for before, after in zip(old.slabs, new.slabs, strict=True):
            stretched(before, bounds, after, by)
        more = even_bounds(new.shape.num_kv_heads, by, new.shape.device)
        bounds_of(new).copy_(bounds + more)

    # Counts

    @property
    def numbers(self) -> list[np.ndarray]:
        """The lead of each slot in each layer; waits for the last compaction, if it is not done."""
        for layers, slots, leads in self._coming:
            self._lead[layers, slots] = leads.read()
        self._coming = []
        return [self._lead]

    def fullest(self, layers: int | np.ndarray, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Rows of the fullest head."""
        (leads,), chosen = self.numbers, np.asarray(slots)
        most: np.ndarray = self.counts.rows[layers, chosen] + leads[layers, chosen]
        return most

    def note_leads(self, layers: Sequence[int], slots: Sequence[int], leads: Tensor) -> None:
        """Note the leads of some slots, each in a layer, ``[B]``, after a compaction."""
        self._coming.append((layers, slots, Download(leads)))

    # Rows

    def all_rows(self, layer: LayerCache, layers: Sequence[int], slots: Sequence[int]) -> Span:
        """The rows of slots that hold equally many in the mean, and in their fullest head."""
        return RaggedSpan(
            self,
            layer,
            self.entries(layer, layers, slots),
            (layers, slots),
            int(self.fullest(layers[0], slots[:1])[0]),
            int(self.counts.rows[layers[0], slots[0]]),
        )

    def open(self, layer: LayerCache, tokens: NewTokens) -> OpenRows:
        """Begin a forward."""
        return OpenRagged(layer, tokens, self)

    def columns(self, layer: LayerCache, slots: Sequence[int]) -> Columns:
        """The rows of the segments, aligned on the right, a copy."""
        rows, most = self.counts.rows[layer.index, list(slots)], self.fullest(layer.index, slots)
        index, present = self.places(layer, slot_index(slots), rows, int(most.max()))
        return Columns(partial(in_columns, index, present), present)

    def places(
        self, layer: LayerCache, served: slice | list[int], rows: np.ndarray, num_columns: int
    ) -> tuple[Tensor, Tensor]:
        """Where the rows of slots lie that are aligned on the right.

        Args:
            layer: The layer.
            served: Index of the slots.
            rows: Their rows, as `Counts` has them, ``[B]``.
            num_columns: Columns, ``T``: rows of the fullest head.

        Returns:
            Places in a slab of the layer, see `taken`, ``[B, H_kv, T]``, and which of them have a
            row, bool.
        """
        device, capacity = layer.shape.device, layer.slab.capacity
        entries = Entries(served, device, self.counts.seq_len[served])
        numbers = upload(rows, device)[:, None, None] + torch.arange(-num_columns, 0, device=device)
        places, present = places_of(entries.of(bounds_of(layer)), capacity, numbers)
        pools = entries.places * layer.shape.num_kv_heads * capacity
        return pools[:, None, None] + places, present

    def place(self, layer: LayerCache, slot: int, held: LayerContents) -> Span:
        """Segments side by side."""
        counts = (held.positions >= 0).sum(dim=1)
        bounds_of(layer)[slot] = packed_bounds(counts[None], layer.slab.capacity - held.rows)[0]
        if held.num_rows:
            lead = counts.amax(dim=0, keepdim=True) - held.rows
            self.note_leads([layer.index], [slot], lead)
        where = ([layer.index], [slot])
        entries = self.entries(layer, *where)
        return RaggedSpan(self, layer, entries, where, held.num_rows, held.rows)


def bounds_of(layer: LayerCache) -> Tensor:
    """The bounds of the segments of a layer, ``[S, H_kv + 1]``."""
    assert layer.bounds is not None, "these slabs are ragged"
    return layer.bounds


class RaggedSpan(Span):
    """Rows of heads that hold different numbers of them; what is read is a copy.

    Attributes:
        present: Columns that have a row, bool ``[B, H_kv, T]``.
    """

    def __init__(
        self,
        layout: Ragged,
        layer: LayerCache,
        entries: Entries,
        where: tuple[Sequence[int], Sequence[int]],
        num_rows: int,
        mean_rows: int,
    ) -> None:
        """Take entries in layers and slots, their columns, and their rows in the mean."""
        self.entries, self.num_rows = entries, num_rows
        self._layout, self._where = layout, where
        self._capacity = layer.slab.capacity
        self._find(entries.of(layer.arena.tables["bounds"]), mean_rows)

    @property
    def absent(self) -> Tensor:
        """Columns that a head has no row for, bool ``[B, H_kv, T]``."""
        return ~self.present

    def part(self, first: int, end: int) -> Span:
        """Some of these columns."""
        part = copy(self)
        part.num_rows = end - first
        part._places, part.present = self._places[:, :, first:end], self.present[:, :, first:end]
        return part

    def read(self, slab: Tensor) -> Tensor:
        """These rows; 0, or -1 of positions, where a head has none."""
        return in_columns(self._index(slab, self._places), self.present, slab)

    def write(self, slab: Tensor, rows: Tensor) -> None:
        """Replace these rows."""
        size = slab.shape[1] * slab.shape[2]
        # What a head has no row for goes behind the pool.
        places = torch.where(self.present, self._places, size).flatten(1)
        pools = self.entries.of(slab).flatten(1, 2)
        wider = torch.cat([pools, pools[:, :1]], dim=1)
        index = places.view(*places.shape, *[1] * (pools.dim() - 2)).expand(
            -1, -1, *pools.shape[2:]
        )
        wider.scatter_(1, index, rows.to(slab.dtype).flatten(1, 2))
        slab[self.entries.index] = wider[:, :size].view(-1, *slab.shape[1:])

    def observed(self, arena: SlabArena, weights_of: Callable[..., Tensor]) -> Tensor:
        """Attention weights of these rows."""
        keys = self.numbers(arena, arena.store.keys)
        return weights_of(keys, self.read(arena.positions), present=self.present)

    def keep(
        self,
        arena: SlabArena,
        keep: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        budget: int | None,
    ) -> Kept:
        """Pack the chosen rows, side by side."""
        if keep.dtype == torch.bool:
            assert budget is not None, "a mask does not say how many rows may stay"
            mask, num_kept = keep, budget
        else:
            within = keep.clamp(0, self.num_rows - 1)
            mask = torch.zeros_like(self.present).scatter_(2, within, True)
            keys, values = (_in_columns(new, within, self.num_rows) for new in (keys, values))
            num_kept = keep.shape[2]
        mask = self._fitting(mask & self.present, num_kept)
        counts = mask.sum(dim=2)
        bounds = packed_bounds(counts, self._capacity - num_kept)
        size = mask.shape[1] * self._capacity
        # Rows that go are moved behind the pool, and then left out.
        targets = bounds[:, :-1, None] + mask.cumsum(dim=2) - 1
        targets = torch.where(mask, targets, size).flatten(1)
        own = torch.arange(size + 1, device=keep.device).expand(len(mask), -1)
        sources = own.scatter(1, targets, self._places.flatten(1))[:, :size]
        moved_from = self._index(arena.positions, sources)
        filled = torch.zeros_like(own, dtype=torch.bool).scatter_(1, targets, True)[:, :size]
        columns = torch.arange(mask[0].numel(), device=keep.device).expand(len(mask), -1)
        column = torch.zeros_like(own).scatter(1, targets, columns)[:, :size]
        most, store = 0, arena.store
        for stored, replacement in ((store.keys, keys), (store.values, values)):
            slab = stored.slab
            moved = taken(slab, moved_from)
            if replacement is not None:
                index = column[..., None].expand(-1, -1, slab.shape[3])
                new = stored.encode(replacement).flatten(1, 2).gather(1, index)
                moved = torch.where(filled[..., None], new, moved)
            most = max(most, self._put(slab, moved))
        for slab, empty in [(arena.positions, -1), *((one, 0) for one in arena.tracks.values())]:
            moved = taken(slab, moved_from).masked_fill_(~filled, empty)
            most = max(most, self._put(slab, moved))
        most = max(most, self._put(arena.tables["bounds"], bounds))
        self._layout.note_leads(*self._where, counts.amax(dim=1) - num_kept)
        self._find(bounds, num_kept)
        return Kept(num_kept, most)

    def _find(self, bounds: Tensor, num_rows: int) -> None:
        """Find the places of these rows, counted from the first of their slot."""
        numbers = torch.arange(num_rows - self.num_rows, num_rows, device=bounds.device)
        self._places, self.present = places_of(bounds, self._capacity, numbers)

    def _fitting(self, mask: Tensor, num_kept: int) -> Tensor:
        """The mask; or the newest rows, where a wrong one, which is known later, would not fit."""
        counts = mask.sum(dim=2)
        fits = (counts.sum(dim=1) <= num_kept * mask.shape[1]) & (counts > 0).all(dim=1)
        newest = torch.arange(self.num_rows, device=mask.device) >= self.num_rows - num_kept
        return torch.where(fits[:, None, None], mask, self.present & newest)

    def _index(self, slab: Tensor, places: Tensor) -> Tensor:
        """Places in the pools of these entries as places in a slab, see `taken`."""
        pools = self.entries.places * slab.shape[1] * slab.shape[2]
        return pools.view(-1, *[1] * (places.dim() - 1)) + places

    def _put(self, tensor: Tensor, contents: Tensor) -> int:
        """Replace all that these entries have in a tensor of the arena; the bytes of that."""
        tensor[self.entries.index] = contents.view(-1, *tensor.shape[1:])
        return contents.nbytes


def _in_columns(new: Tensor | None, index: Tensor, num_rows: int) -> Tensor | None:
    """Replacements ``[B, H_kv, K, D]`` in the columns of the rows that they replace."""
    if new is None:
        return None
    wide = new.new_zeros(*new.shape[:2], num_rows, new.shape[3])
    return wide.scatter_(2, index[..., None].expand_as(new), new)


class OpenRagged(OpenSlabs):
    """New rows behind those of each segment; attention gets copies of all of them in columns."""

    def __init__(self, layer: LayerCache, tokens: NewTokens, layout: Ragged) -> None:
        super().__init__(layer, tokens)
        device, slots, counts = layer.shape.device, tokens.slots, layout.counts
        before = counts.rows[layer.index, slots]
        most = int((layout.fullest(layer.index, slots) + tokens.lengths).max())
        bounds, capacity = bounds_of(layer), layer.slab.capacity
        after = before + tokens.lengths
        self._index, self._present = layout.places(layer, tokens.served, after, most)
        new = upload(tokens.rows(before), device)
        ones = tokens.on(device)
        new_places, _ = places_of(bounds[ones.slots], capacity, new[:, None, None])
        self._new = (ones.slots[:, None], new_places[:, :, 0])
        every = np.full_like(tokens.lengths, most)
        self.visible = Visible(
            tokens.lengths,
            every,
            tokens.width,
            device,
            also=self._with_a_row,
            ahead=tokens.ahead,
        )
        self._note_copy = counts.note_copy

    def _with_a_row(self, now: slice, columns: slice) -> Tensor:
        """Columns that have a row, and the own one of a query: a pad has no row there."""
        device, first = self._present.device, self._present.shape[2] - self.tokens.width
        column = torch.arange(columns.start, columns.stop, device=device)
        own = torch.arange(first + now.start, first + now.stop, device=device)[:, None]
        return self._present[:, :, None, columns] | (column == own)

    def put(self, slab: Tensor, new: Tensor | int) -> None:
        """Write the new rows of a slab, or a number."""
        slab.flatten(1, 2)[self._new] = new if isinstance(new, int) else self.tokens.real(new)

    def put_each(self, slab: Tensor, new: Tensor) -> None:
        """Write the new rows of a slab, without pads."""
        slab.flatten(1, 2)[self._new] = new

    def read(self, slab: Tensor) -> Tensor:
        """The rows of a slab in columns, a copy; 0 where there is no row."""
        return in_columns(self._index, self._present, slab)

    def add(self, track: Tensor, received: Tensor) -> None:
        """Add to a track where columns have a row."""
        added = torch.where(self._present, received, 0)  # the others name the first row of a head
        track.view(-1).index_add_(0, self._index.flatten(), added.flatten())

    def store(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new rows behind those held."""
        all_keys, all_values = super().store(keys, values)
        self._note_copy(all_keys.nbytes + all_values.nbytes)
        return all_keys, all_values


def in_columns(index: Tensor, present: Tensor, slab: Tensor) -> Tensor:
    """The rows of a slab at some places, ``[B, H_kv, T, ...]``; 0, or -1, where there is no row."""
    rows = taken(slab, index)
    absent = ~present.view(*present.shape, *[1] * (rows.dim() - 3))
    return rows.masked_fill_(absent, -1 if slab.dtype == torch.int64 else 0)
