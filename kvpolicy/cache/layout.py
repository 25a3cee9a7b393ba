"""The layout of one forward: where its new rows are stored and what its queries may see.

A forward serves some slots. Each has some new tokens; if the numbers differ, token columns are
padded on the left, so that the last column is always the newest token. Pads are computed and
dropped: they are never stored or attended to.

A layer with a sliding window may get more new rows than its slab can take. The new rows are then
attended to together with the old ones, and those that the newest token still sees are stored.

Where KV heads share the rows of a layer, rows are copied out of their segments, aligned on the
right, and a mask hides what a head has no row for.
"""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.slab import KVCache, LayerCache, slot_index
from kvpolicy.cache.sliding_window import concat_rows, drop_oldest, seen_in_window


@attrs.define(eq=False)
class LayerLayout:
    """Where the new rows of a forward go in one layer, and what its queries may see.

    Attributes:
        sequences: Which sequence of the forward each new row belongs to, ``[N]``.
        slots: Slot of each new row, ``[N]``.
        rows: Row of each new row in its slab, ``[N]``; in a ragged slab, its number.
        positions: Position of each new row's token in its sequence, ``[N]``.
        num_rows: Rows to attend to: those of the fullest slot and KV head.
        mask: Rows each query may see, bool ``[B, 1 or H_kv, L, T]``; ``None``: all.
        kept: Of the rows attended to, those that the slabs hold afterwards, ``[B, K]``, if the
            slab is a window that slides on; ``None``: all, in place.
        places: Place of each row attended to in the pool of its slot, ``[B, H_kv, T]``, if slabs
            are ragged; ``None``: in order.
        present: Those that a head has, bool ``[B, H_kv, T]``, likewise.
    """

    sequences: Tensor
    slots: Tensor
    rows: Tensor
    positions: Tensor
    num_rows: int
    mask: Tensor | None
    kept: Tensor | None = None
    places: Tensor | None = None
    present: Tensor | None = None

    def add(self, track: Tensor, served: slice | list[int], received: Tensor) -> None:
        """Add what the rows attended to have received to a track of the slabs.

        Args:
            track: ``[S, H_kv, capacity]``, changed in place.
            served: Slots of the forward.
            received: ``[B, H_kv, T]``. Where slabs are windows that slide on, T is the number of
                rows that they hold afterwards.
        """
        if self.places is None or self.present is None:
            num_rows = self.num_rows if self.kept is None else self.kept.shape[1]
            track[served, :, :num_rows] += received
            return
        pools = track[served].flatten(1)
        held = pools.gather(1, self.places.flatten(1)).reshape(self.places.shape) + received
        size = pools.shape[1]
        # What a head has no row for goes behind the pool, and is left out.
        places = torch.where(self.present, self.places, size).flatten(1)
        wider = torch.cat([pools, pools[:, :1]], dim=1).scatter_(1, places, held.flatten(1))
        track[served] = wider[:, :size].view(-1, *track.shape[1:])


class StepLayout:
    """The new tokens of one forward, and where each layer stores them.

    Attributes:
        cache: The KV cache.
        slots: Slots of the forward, ``[B]``.
        served: Index of these slots.
        lengths: New tokens of each slot, ``[B]``.
        totals: Tokens of each slot once its prompt is in, ``[B]``.
        width: Token columns, ``L``.
        position_ids: Position of every column's token in its sequence, ``[B, L]``, 0 for pads.
        has_pads: Whether some column is a pad.
        layers: Layout of each layer that has stored its new rows.
        attended: Layers whose attention was computed.
    """

    def __init__(
        self,
        cache: KVCache,
        slots: Sequence[int],
        lengths: Sequence[int],
        totals: Sequence[int] | None = None,
    ) -> None:
        """Serve slots, with so many new tokens each (at least 1).

        ``totals`` is not needed if no more tokens of their prompts follow.
        """
        self.cache = cache
        self.slots, self.served = np.asarray(slots), slot_index(slots)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.width = int(self.lengths.max())
        self.seq_len = cache.seq_len[self.slots]
        self.totals = self.seq_len + self.lengths if totals is None else np.asarray(totals)
        # Index of each column's token among the new ones of its slot, negative for pads.
        self.token = np.arange(self.width) - (self.width - self.lengths[:, None])  # [B, L]
        self.is_real = self.token >= 0
        self.has_pads = not self.is_real.all()
        self.position_ids: np.ndarray = np.maximum(self.seq_len[:, None] + self.token, 0)
        self.layers: dict[int, LayerLayout] = {}
        self.attended: set[int] = set()
        # Layers that hold the same rows share their layout.
        self._shared: dict[tuple[object, ...], LayerLayout] = {}
        self._window_index: dict[tuple[torch.device, int], tuple[Tensor, ...]] = {}

    def store(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new rows of one layer, ``[B, H_kv, L, D]``; return all rows to attend to."""
        layer = self.cache.layers[layer_idx]
        if self.width == 1 and layer.slides:
            self._drop_oldest_if_full(layer_idx)
        layout = self.layers[layer_idx] = self._layer_layout(layer_idx, layer)
        keys, values = (self._real(new).to(layer.shape.dtype) for new in (keys, values))
        new = (keys, values, layout.positions[:, None])
        slabs = (layer.keys, layer.values, layer.positions)
        if layer.bounds is not None:
            for slab, rows in zip(slabs, new, strict=True):
                layer.put(slab, layout.slots, layout.rows, rows)
            return self._in_columns(layer_idx, layer)
        if layout.kept is None:
            for slab, rows in zip(slabs, new, strict=True):
                slab[layout.slots, :, layout.rows] = rows
            held = (self.served, slice(None), slice(layout.num_rows))
            all_keys, all_values, positions = layer.keys[held], layer.values[held], None
        else:
            all_keys, all_values, positions = self._slide(layer_idx, layout, slabs, new)
        window = layer.shape.sliding_window
        if window is not None and self._hides(window) and self._has_gaps(layer_idx):
            positions = layer.positions[held] if positions is None else positions
            recent = seen_in_window(positions, self._query_positions(), window)
            mask = recent if layout.mask is None else layout.mask & recent
            self.layers[layer_idx] = attrs.evolve(layout, mask=mask)
        return all_keys, all_values

    def new_rows(
        self, layer_idx: int, states: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What belongs to tokens, without pads, after the layer has stored its rows.

        Args:
            layer_idx: Decoder layer, counted from 0.
            states: A state of every column, ``[B, L, M]``.
            keys: ``[B, H_kv, L, D]``.
            values: Likewise.

        Returns:
            States ``[N, M]``, keys and values ``[N, H_kv, D]``, positions ``[N]``.
        """
        dtype = self.cache.layers[layer_idx].shape.dtype
        keys, values = (self._real(new).to(dtype) for new in (keys, values))
        return self._real(states[:, None])[:, 0], keys, values, self.layers[layer_idx].positions

    def mark(self, layer_idx: int, marks: Mapping[str, Tensor]) -> None:
        """Write numbers of the new rows of a layer, ``[N, H_kv]``, into its tracks.

        Args:
            layer_idx: Decoder layer, counted from 0; it has stored its rows.
            marks: The numbers by the name of a track.
        """
        layer, layout = self.cache.layers[layer_idx], self.layers[layer_idx]
        slots, rows, held = layout.slots, layout.rows, None
        if layout.kept is not None:  # new rows that have left the window already have no place
            rows = rows - layout.kept[layout.sequences, 0]
            held = rows >= 0
            slots, rows = slots[held], rows[held]
        for name, numbers in marks.items():
            track = layer.tracks[name]
            new = (numbers if held is None else numbers[held]).to(track.dtype)
            layer.put(track, slots, rows, new)

    def _in_columns(self, layer_idx: int, layer: LayerCache) -> tuple[Tensor, Tensor]:
        """Rows of ragged slabs, new ones included, as ``[B, H_kv, T, D]``."""
        device, served = layer.shape.device, self.served
        most = self.cache.fullest(layer_idx, self.slots) + self.lengths
        after = self.cache.rows[layer_idx, self.slots] + self.lengths
        num_rows = int(most.max())
        places, present = layer.columns(served, after, num_rows)
        # A query sees the rows before it, and its own column, also a pad, which has no row.
        column = torch.arange(num_rows, device=device)
        own = torch.arange(num_rows - self.width, num_rows, device=device)[:, None]
        mask = (present[:, :, None] & (column <= own)) | (column == own)
        self.layers[layer_idx] = attrs.evolve(
            self.layers[layer_idx], num_rows=num_rows, mask=mask, places=places, present=present
        )
        keys, values = (
            layer.gathered(slab, served, places, present) for slab in (layer.keys, layer.values)
        )
        self.cache.note_copy(keys.nbytes + values.nbytes)
        return keys, values

    def _layer_layout(self, layer_idx: int, layer: LayerCache) -> LayerLayout:
        """Where the new rows go in this layer; computed once for layers that hold the same."""
        before = self.cache.rows[layer_idx, self.slots]
        window, capacity = layer.shape.sliding_window, layer.slab.capacity
        # With gaps a row further is not a position further: `store` masks by position then.
        if window is not None and (not self._hides(window) or self._has_gaps(layer_idx)):
            window = None
        overflows = layer.slides and bool((before + self.lengths > capacity).any())
        key = (layer.shape.device, before.tobytes(), window, capacity if overflows else None)
        if key not in self._shared:
            layout = self._compute_layout(before, layer.shape.device, window)
            if overflows:
                layout.kept = self._kept(before, layer)
            self._shared[key] = layout
        return self._shared[key]

    def _compute_layout(
        self, before: np.ndarray, device: torch.device, window: int | None
    ) -> LayerLayout:
        sequences, _ = np.nonzero(self.is_real)
        token = self.token[self.is_real]
        after = before + self.lengths
        num_rows = int(after.max())
        mask = None
        if self.width > 1 or not (after == num_rows).all():
            # A query sees the old rows and the new ones up to its own; a pad sees the first
            # row, so that its softmax has something to normalise.
            newest = np.maximum(before[:, None] + self.token, 0)[..., None]  # [B, L, 1]
            visible = np.arange(num_rows) <= newest
            if window is not None:  # rows without gaps: a row further is a position further
                visible &= np.arange(num_rows) > newest - window
            mask = torch.from_numpy(visible)[:, None].to(device)
        return LayerLayout(
            sequences=torch.from_numpy(sequences).to(device),
            slots=torch.from_numpy(self.slots[sequences]).to(device),
            rows=torch.from_numpy(before[sequences] + token).to(device),
            positions=torch.from_numpy(self.seq_len[sequences] + token).to(device),
            num_rows=num_rows,
            mask=mask,
        )

    def _kept(self, before: np.ndarray, layer: LayerCache) -> Tensor:
        """Of old and new rows together, the newest that a slab can hold, ``[B, K]``."""
        after = before + self.lengths
        most = layer.slab.capacity
        num_kept = int(np.minimum(after, most).max())
        leaving = np.maximum(after - most, 0)
        kept = leaving[:, None] + np.arange(num_kept)
        return torch.from_numpy(kept).to(layer.shape.device)

    def _hides(self, window: int) -> bool:
        """Whether a sliding window hides any row from the new tokens."""
        return bool((self.seq_len + self.lengths).max() > window)

    def _has_gaps(self, layer_idx: int) -> bool:
        return bool(self.cache.compacted_at[layer_idx, self.slots].any())

    def _drop_oldest_if_full(self, layer_idx: int) -> None:
        """Drop the row that a new token cannot see from slabs that hold a whole window."""
        rows = self.cache.rows[layer_idx, self.slots]
        full = self.slots[rows == self.cache.capacity[layer_idx]]
        if full.size:
            drop_oldest(self.cache, layer_idx, full.tolist(), 1)

    def _slide(
        self,
        layer_idx: int,
        layout: LayerLayout,
        slabs: Sequence[Tensor],
        new: Sequence[Tensor],
    ) -> list[Tensor]:
        """Concatenate old and new rows, store the newest, and return all of them."""
        layer, served = self.cache.layers[layer_idx], self.served
        assert layout.kept is not None
        where = (layout.sequences, layout.rows)
        empty = (0, 0, -1)
        all_rows = [
            concat_rows(slab[served], rows, where, layout.num_rows, fill)
            for slab, rows, fill in zip(slabs, new, empty, strict=True)
        ]
        tracks = list(layer.tracks.values())
        moved = [concat_rows(track[served], 0, where, layout.num_rows, 0) for track in tracks]
        num_bytes = sum(rows.nbytes for rows in [*all_rows, *moved])
        for slab, rows in zip([*slabs, *tracks], [*all_rows, *moved], strict=True):
            index = layout.kept[:, None, :, *[None] * (rows.dim() - 3)]
            stored = rows.gather(2, index.expand(-1, rows.shape[1], -1, *rows.shape[3:]))
            slab[served, :, : stored.shape[2]] = stored
            self.cache.note_copy(num_bytes + stored.nbytes)
        # Until `commit`, only the remaining old rows are counted.
        rows_held = self.cache.rows[layer_idx, self.slots]
        after = np.minimum(rows_held + self.lengths, layer.slab.capacity)
        remaining = np.maximum(after - self.lengths, 0)
        self.cache.drop_first(layer_idx, self.slots, rows_held - remaining)
        return all_rows

    def _query_positions(self) -> np.ndarray:
        """Position of each query, ``[B, L]``; -1 for pads, from which nothing is hidden."""
        return np.where(self.is_real, self.position_ids, -1)

    def _real(self, columns: Tensor) -> Tensor:
        """The entries of ``[B, H, L, D]`` that belong to tokens, ``[N, H, D]``."""
        by_token = columns.transpose(1, 2)
        if not self.has_pads:
            return by_token.flatten(0, 1)
        return by_token[torch.from_numpy(self.is_real).to(columns.device)]

    def remember_queries(self, layer: LayerCache, queries: Tensor) -> None:
        """Put the newest queries, ``[B, H_q, L, D]``, into the layer's query window."""
        if layer.window is None:
            return
        size, device = layer.slab.window_size, layer.shape.device
        if (device, size) not in self._window_index:
            recent = self.is_real & (self.token >= self.lengths[:, None] - size)
            sequences, columns = np.nonzero(recent)
            place = (self.seq_len[sequences] + self.token[recent]) % size
            arrays = (sequences, columns, self.slots[sequences], place)
            index = tuple(torch.from_numpy(array).to(device) for array in arrays)
            self._window_index[device, size] = index
        sequences_, columns_, slots_, place_ = self._window_index[device, size]
        layer.window[slots_, :, place_] = queries[sequences_, :, columns_]

    def commit(self) -> None:
        """Count the new rows, after all layers have stored them."""
        self.cache.count(self.slots, self.lengths)
