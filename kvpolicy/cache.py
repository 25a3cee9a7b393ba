"""Slots and slabs: keys and values of all sequences, allocated once, compacted in place.

Every sequence owns one slot. In each layer a slot is a slab of ``capacity`` rows; the first
``rows`` of them hold tokens, in order of their positions, the rest are empty. Slots in use
are always the first ones, so that every forward works on a plain slice of the slabs.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

# The track that attention fills by itself, for policies that name it as an argument.
ATTN_SUMS = "attn_sums"


@attrs.frozen
class LayerShape:
    """What one layer's keys and values look like, and where they live."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of one token in this layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@attrs.frozen
class Slab:
    """How much one layer keeps of every sequence.

    Attributes:
        capacity: Rows allocated for each slot.
        window_size: Most recent queries to remember, 0 for none.
        tracks: Names of per-row fp32 numbers that travel with the rows.
    """

    capacity: int
    window_size: int = 0
    tracks: tuple[str, ...] = ()


class LayerCache:
    """The slabs of one layer.

    Attributes:
        keys: Keys after RoPE, ``[S, H_kv, capacity, D]``.
        values: Values, ``[S, H_kv, capacity, D]``.
        positions: Place of each row's token in its sequence, ``[S, H_kv, capacity]``,
            int64, strictly rising along the rows, -1 where empty.
        tracks: Per-row numbers by name, ``[S, H_kv, capacity]``, fp32, 0 where empty.
        window: The last queries after RoPE, ``[S, H_q, W, D]``: the query of position p
            stands at ``p % W``. ``None`` when nobody reads queries.
    """

    def __init__(self, shape: LayerShape, slab: Slab, num_slots: int) -> None:
        self.shape = shape
        self.slab = slab
        rows = (num_slots, shape.num_kv_heads, slab.capacity)
        there = {"dtype": shape.dtype, "device": shape.device}
        self.keys = torch.zeros(*rows, shape.head_dim, **there)
        self.values = torch.zeros(*rows, shape.head_dim, **there)
        self.positions = torch.full(rows, -1, dtype=torch.int64, device=shape.device)
        self.tracks = {
            name: torch.zeros(rows, dtype=torch.float32, device=shape.device)
            for name in slab.tracks
        }
        self.window: Tensor | None = None
        if slab.window_size:
            queries = (num_slots, shape.num_heads, slab.window_size, shape.head_dim)
            self.window = torch.zeros(queries, **there)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything allocated for this layer; the first axis is always the slot."""
        tensors = [self.keys, self.values, self.positions, *self.tracks.values()]
        return tensors if self.window is None else [*tensors, self.window]

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.positions[slot] = -1
        for track in self.tracks.values():
            track[slot] = 0

    def copy_slot(self, source: int, target: int) -> None:
        """Make ``target`` hold what ``source`` holds."""
        for tensor in self.tensors:
            tensor[target] = tensor[source]


class Cache:
    """The slabs of all layers, and how far each slot is filled.

    Attributes:
        layers: One `LayerCache` for each decoder layer.
        rows: Rows held in each layer by each slot, ``[layers, S]``.
        seq_len: Tokens each slot's sequence has seen, ``[S]``.
        transient_bytes: The largest copy any compaction needed so far.
    """

    def __init__(self, shapes: Sequence[LayerShape], slabs: Sequence[Slab], num_slots: int) -> None:
        self.num_slots = num_slots
        self.layers = [
            LayerCache(shape, slab, num_slots) for shape, slab in zip(shapes, slabs, strict=True)
        ]
        self.capacity = np.array([slab.capacity for slab in slabs], dtype=np.int64)
        self.rows = np.zeros((len(self.layers), num_slots), dtype=np.int64)
        self.seq_len = np.zeros(num_slots, dtype=np.int64)
        self.transient_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for all slabs, positions, tracks and query windows."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated, and the largest copy a compaction needed on top."""
        return self.num_bytes + self.transient_bytes

    def clear(self, slot: int) -> None:
        """Empty a slot in all layers."""
        for layer in self.layers:
            layer.clear(slot)
        self.rows[:, slot] = 0
        self.seq_len[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Give the sequence in ``source`` the slot ``target``, and empty ``source``."""
        for layer in self.layers:
            layer.copy_slot(source, target)
        self.rows[:, target] = self.rows[:, source]
        self.seq_len[target] = self.seq_len[source]
        self.clear(source)

    def num_free_rows(self, first: int, last: int) -> int:
        """Tokens that every slot of ``[first, last)`` can still take in every layer."""
        return int((self.capacity[:, None] - self.rows[:, first:last]).min())


class LayerRows:
    """The rows that some slots hold in one layer: what the hooks of a compaction see.

    All slots hold the same number of rows here, so that the tensors have no padding.
    """

    def __init__(self, cache: Cache, layer_idx: int, slots: Sequence[int]) -> None:
        self._cache = cache
        self._layer = cache.layers[layer_idx]
        self._layer_idx = layer_idx
        self._slots = list(slots)
        self.num_rows = int(cache.rows[layer_idx, slots[0]])
        self.seq_len = torch.from_numpy(cache.seq_len[self._slots])
        self.kept: Tensor | None = None
        # A slice is read as a view, a list of slots as a copy: one due sequence, the common
        # case, costs nothing.
        first, last = self._slots[0], self._slots[-1] + 1
        contiguous = self._slots == list(range(first, last))
        self._target: slice | list[int] = slice(first, last) if contiguous else self._slots

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor[self._target][:, :, : self.num_rows]

    @property
    def keys(self) -> Tensor:
        """Keys after RoPE, ``[B, H_kv, T, D]``."""
        return self._rows(self._layer.keys)

    @property
    def values(self) -> Tensor:
        """Values, ``[B, H_kv, T, D]``."""
        return self._rows(self._layer.values)

    @property
    def positions(self) -> Tensor:
        """Place of each row's token in its sequence, ``[B, H_kv, T]``, int64."""
        return self._rows(self._layer.positions)

    @property
    def tracks(self) -> "Tracks":
        """The per-row numbers of these rows, by name."""
        return Tracks(self)

    def track(self, name: str) -> Tensor:
        """One track of these rows, ``[B, H_kv, T]``, fp32."""
        return self._rows(self._layer.tracks[name])

    def set_track(self, name: str, values: Tensor) -> None:
        """Give these rows new numbers, ``[B, H_kv, T]``."""
        self._layer.tracks[name][self._target, :, : self.num_rows] = values

    @property
    def queries(self) -> Tensor:
        """The last queries after RoPE, oldest first, ``[B, H_q, W, D]``.

        Fewer than ``window_size`` if the shortest of the sequences has seen fewer tokens.
        """
        window = self._layer.window
        assert window is not None, "nobody in this layer's stack asked for queries"
        size = window.shape[2]
        num = min(size, int(self.seq_len.min()))
        order = (self.seq_len[:, None] - num + torch.arange(num)) % size  # [B, W]
        index = order.to(window.device)[:, None, :, None]
        queries = window[self._target]
        return queries.gather(2, index.expand(-1, queries.shape[1], -1, queries.shape[3]))

    def keep(
        self, keep: Tensor, *, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        """Make the chosen rows the whole contents of these slots, in place.

        Args:
            keep: Rows that stay, ``[B, H_kv, K]``, int64, rising.
            keys: What to store for their keys instead, ``[B, H_kv, K, D]``.
            values: What to store for their values instead, ``[B, H_kv, K, D]``.
        """
        wide = keep[..., None].expand(-1, -1, -1, self._layer.shape.head_dim)
        self._store(self._layer.keys, self.keys.gather(2, wide) if keys is None else keys)
        self._store(self._layer.values, self.values.gather(2, wide) if values is None else values)
        self._store(self._layer.positions, self.positions.gather(2, keep), empty=-1)
        for name, track in self._layer.tracks.items():
            self._store(track, self.track(name).gather(2, keep), empty=0)
        self._cache.rows[self._layer_idx, self._slots] = keep.shape[2]
        self.kept = keep

    def _store(self, tensor: Tensor, rows: Tensor, empty: int | None = None) -> None:
        num = rows.shape[2]
        tensor[self._target, :, :num] = rows
        if empty is not None:
            tensor[self._target, :, num : self.num_rows] = empty
        # Slots that are no slice are copied out before the rows are gathered.
        copies = 1 if isinstance(self._target, slice) else 2
        self._cache.transient_bytes = max(self._cache.transient_bytes, copies * rows.nbytes)


class Tracks:
    """Per-row numbers that travel with the rows, by name, for the rows of one compaction.

    ``tracks["name"]`` is ``[B, H_kv, T]``, fp32, 0 for rows that joined since the last
    compaction; assigning to it gives the rows new numbers. A policy declares the names it
    uses in a class attribute ``tracks``.
    """

    def __init__(self, rows: LayerRows) -> None:
        self._rows = rows

    def __getitem__(self, name: str) -> Tensor:
        """The numbers of these rows, ``[B, H_kv, T]``, fp32."""
        return self._rows.track(name)

    def __setitem__(self, name: str, values: Tensor) -> None:
        """Give these rows new numbers, ``[B, H_kv, T]``."""
        self._rows.set_track(name, values)
