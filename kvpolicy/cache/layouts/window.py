"""Sliding windows: which rows of a layer no later query can see, and how they leave.

A query at position p sees the rows at positions above ``p - window``. The positions in a slab
are distinct, so if it holds more rows than the window is long, its first rows are outside the
window in every KV head, whatever policies have kept there. Between compactions windows therefore
slide by counting rows: no position is read from the device.

A compaction reads positions. Before it the rows leave that are outside the window in all heads.
Rows that are outside it in some heads only stay stored, are hidden from attention, and get the
lowest score.

A forward may bring in more rows than a slab takes. The new rows are then beside the slab, attended
to together with the old ones, and those that the newest token still sees are stored at the commit.
"""

from collections.abc import Sequence
from functools import partial
from operator import setitem
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.visible import Visible
from kvpolicy.cache.counts import Counts
from kvpolicy.cache.layouts.base import ALL, PLENTY, LayerCache, OpenRows
from kvpolicy.cache.layouts.even import Even, OpenEven, where_rows_go
from kvpolicy.cache.layouts.places import new_places
from kvpolicy.cache.layouts.tokens import NewTokens
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.devices import upload


class Window(Even):
    """Even slabs of layers with a sliding window, which never hold more rows than that.

    A slab that holds a whole window takes any number of tokens without a compaction: with every
    token one row leaves.
    """

    drops_unseen = True
    _slide: np.ndarray  # layers whose slabs hold a whole window, [n, 1]

    def attach(self, layers: Sequence[LayerCache]) -> None:
        """Take its layers as they are now."""
        super().attach(layers)
        self._slide = np.array([layer.slides for layer in layers])[:, None]

    def fit(self, shape: LayerShape, slab: Slab) -> Slab:
        """No more rows than the window, and none beside it, which would not leave with them."""
        return attrs.evolve(slab, capacity=min(slab.capacity, window_of(shape)), staging=None)

    def room(self, slots: Sequence[int]) -> np.ndarray:
        """Any number of tokens for whole windows."""
        return np.where(self._slide, PLENTY, super().room(slots))

    def out_of_sight(self, shape: LayerShape, positions: Tensor, seq_len: np.ndarray) -> Tensor:
        """Rows that have left the window of the next query."""
        oldest = upload(seq_len - window_of(shape), positions.device)
        return positions <= oldest[:, None, None]

    def sees(
        self, shape: LayerShape, positions: Tensor, tokens: NewTokens, now: slice = ALL
    ) -> Tensor:
        """Rows within the window of each token; all for pads."""
        queries = np.where(tokens.is_real, tokens.position_ids, -1)[:, now]
        oldest = upload(queries - window_of(shape), positions.device)
        return positions[:, :, None, :] > oldest[:, None, :, None]

    def drop_unseen(self, layer: LayerCache, slot: int, num_hidden: int) -> None:
        """Drop the first rows of a slot, which have left the window."""
        num = num_hidden + self._num_hidden_in_front(layer, slot)
        if num:
            held = layer.rows_of(slot)
            staying = torch.arange(num, held.num_rows, device=layer.shape.device)
            staying = staying.expand(1, layer.shape.num_kv_heads, -1)
            kept = held.keep(layer.arena, staying, None, None, None)
            self.counts.note_copy(kept.copied_bytes)
            self.counts.drop_first(layer.index, [slot], num)

    def _num_hidden_in_front(self, layer: LayerCache, slot: int) -> int:
        """Rows out of sight before those that hooks see: the end of a prompt, without gaps."""
        counts = self.counts
        held, end = counts.prompt_rows[layer.index, slot], counts.prompt_len[slot]
        in_sight = end - (counts.seq_len[slot] - window_of(layer.shape) + 1)
        return int(held - np.clip(in_sight, 0, held))

    def open(self, layer: LayerCache, tokens: NewTokens) -> OpenRows:
        """Begin a forward."""
        before = self.counts.rows[layer.index, tokens.slots]
        size, reach, has_gaps = window_of(layer.shape), None, False
        if (tokens.seq_len + tokens.lengths).max() > size:  # it hides any row from the new tokens
            # Without gaps a row further is a position further.
            has_gaps = bool(self.counts.compacted_at[layer.index, tokens.slots].any())
            reach = None if has_gaps else size
        if layer.slides and (before + tokens.lengths > layer.slab.capacity).any():
            return OpenSliding(layer, tokens, before, reach, has_gaps, self.counts)
        return OpenWindow(layer, tokens, before, reach, has_gaps)


def window_of(shape: LayerShape) -> int:
    """The sliding window of a layer."""
    assert shape.sliding_window is not None, "this layer has a sliding window"
    return shape.sliding_window


def _in_sight(layer: LayerCache, tokens: NewTokens, positions: Tensor, visible: Visible) -> Visible:
    """Those of rows at some positions, ``[B, H_kv, T]``, that are not out of sight."""

    def also(now: slice, rows: slice) -> Tensor:
        return layer.layout.sees(layer.shape, positions[:, :, rows], tokens, now)

    return attrs.evolve(visible, also=also)


class OpenWindow(OpenEven):
    """New rows in free places."""

    repeats = False  # masks may be those of positions

    def __init__(
        self,
        layer: LayerCache,
        tokens: NewTokens,
        before: np.ndarray,
        reach: int | None,
        by_position: bool,
    ) -> None:
        """As `OpenEven`; ``by_position``: the positions of rows say which of them a query sees."""
        super().__init__(layer, tokens, before, reach)
        self._by_position = by_position

    def store(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new rows behind those held."""
        rows = super().store(keys, values)
        if self._by_position:
            self.visible = _in_sight(self.layer, self.tokens, self.positions, self.visible)
        return rows


class OpenSliding(OpenRows):
    """New rows beside the slabs, which slide on at the commit.

    Attention gets copies: old rows, then new ones. A single new token does not see the oldest row
    of a full slab, which is left out.
    """

    def __init__(
        self,
        layer: LayerCache,
        tokens: NewTokens,
        before: np.ndarray,
        reach: int | None,
        by_position: bool,
        counts: Counts,
    ) -> None:
        """As `OpenWindow`; ``counts`` are those of the cache."""
        super().__init__(layer, tokens)
        device, most = layer.shape.device, layer.slab.capacity
        self._by_position, self._counts, self._before = by_position, counts, before
        self._ones = tokens.on(device)
        self._gone = np.where((before == most) & (tokens.width == 1), 1, 0)
        staying = before - self._gone
        where = where_rows_go(tokens, staying, device, reach)
        self.visible, self._num_rows = where.visible, where.num_rows
        key = "joined", device, staying.tobytes()
        entries = np.arange(len(staying))
        self._places = tokens.shared(key, lambda: new_places(tokens, entries, staying, device))
        # Of the rows attended to, the newest that a slab can hold.
        after = before - self._gone + tokens.lengths
        num_kept = int(np.minimum(after, most).max())
        first = np.maximum(after - most, 0)
        self._kept = upload(first[:, None] + np.arange(num_kept), device)
        self._rows = tokens.rows(staying) - first[tokens.sequences]
        self._new: list[Tensor] = []

    def store(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Hold the new rows beside the slabs."""
        store, tokens = self.layer.store, self.tokens
        self._new = [
            stored.encode(tokens.real(new))
            for stored, new in ((store.keys, keys), (store.values, values))
        ]
        tokens.beside_bytes += sum(new.nbytes for new in self._new)
        all_rows = [self._joined(*pair, 0) for pair in zip(store.slabs, self._new, strict=True)]
        if self._by_position:
            self.visible = _in_sight(self.layer, tokens, self.positions, self.visible)
        found = store.keys.decode(all_rows[0]), store.values.decode(all_rows[1])
        copies = {id(rows): rows.nbytes for rows in (*all_rows, *found)}
        self._counts.note_copy(sum(copies.values()) + tokens.beside_bytes)
        return found

    @property
    def positions(self) -> Tensor:
        """Positions of the old rows, then of the new ones."""
        return self._joined(self.layer.positions, self._ones.positions[:, None], -1)

    def receive(self, name: str, received: Tensor) -> None:
        """Note what rows have received, of those that stay."""
        received = self._staying(received)
        served = self.tokens.served_on(received.device)
        rows = (served, slice(None), slice(received.shape[2]))
        self._at_commit.append(partial(_add, self.layer.tracks[name], rows, received))

    def annotate(self, name: str, numbers: Tensor) -> None:
        """Note numbers of the new rows; those that have left the window already have no place."""
        held = np.flatnonzero(self._rows >= 0)
        slots = self.tokens.slots[self.tokens.sequences[held]]
        track = self.layer.tracks[name]
        which, *where = upload(np.stack([held, slots, self._rows[held]]), track.device)
        new = (where[0], slice(None), where[1])
        self._at_commit.append(partial(setitem, track, new, numbers[which].to(track.dtype)))

    def commit(self) -> None:
        """Store the newest rows."""
        layer, counts, tokens = self.layer, self._counts, self.tokens
        new: list[tuple[Tensor | int, int]] = [(rows, 0) for rows in self._new]
        new += [(self._ones.positions[:, None], -1), *((0, 0) for _ in layer.tracks)]
        for slab, (rows, empty) in zip(layer.slabs, new, strict=True):
            joined = self._joined(slab, rows, empty)
            stored = self._staying(joined)
            slab[tokens.served_on(slab.device), :, : stored.shape[2]] = stored
            counts.note_copy(joined.nbytes + stored.nbytes + tokens.beside_bytes)
            del joined, stored  # free them before the next copies are made
        self._new = []
        after = np.minimum(self._before + tokens.lengths, layer.slab.capacity)
        remaining = np.maximum(after - tokens.lengths, 0)
        counts.drop_first(layer.index, tokens.slots, self._before - remaining)
        super().commit()

    def _joined(self, slab: Tensor, new: Tensor | int, empty: int) -> Tensor:
        """The rows of a slab followed by new rows, as a new tensor, ``[B, H_kv, T, ...]``."""
        num_rows, served = self._num_rows, slab[self.tokens.served_on(slab.device)]
        rows = slab.new_full((*served.shape[:2], num_rows, *slab.shape[3:]), empty)
        gone = int(self._gone[0])
        if (self._gone == gone).all():
            held = served[:, :, gone : gone + num_rows]
        else:
            first = upload(self._gone, slab.device)
            index = first[:, None] + torch.arange(num_rows, device=slab.device)
            held = _taken(served, index.clamp(max=slab.shape[2] - 1))
        rows[:, :, : held.shape[2]] = held
        if isinstance(new, int):
            self._places.put(rows, new)
        else:
            self._places.put_each(rows, new)
        return rows

    def _staying(self, rows: Tensor) -> Tensor:
        """Those of rows ``[B, H_kv, T, ...]`` that a slab can hold."""
        return _taken(rows, self._kept)


def _add(track: Tensor, index: tuple[Any, ...], received: Tensor) -> None:
    track[index] += received


def _taken(rows: Tensor, index: Tensor) -> Tensor:
    """Rows ``[B, H_kv, T, ...]`` of each entry at an index, ``[B, K]``, in all heads."""
    wide = index[:, None, :, *[None] * (rows.dim() - 3)]
    return rows.gather(2, wide.expand(-1, rows.shape[1], -1, *rows.shape[3:]))
