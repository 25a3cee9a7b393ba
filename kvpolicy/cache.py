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

    def zeros(self, *size: int) -> Tensor:
        """Zeros in this layer's dtype, on its device."""
        return torch.zeros(size, dtype=self.dtype, device=self.device)


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
        self.keys = shape.zeros(*rows, shape.head_dim)
        self.values = shape.zeros(*rows, shape.head_dim)
        self.positions = torch.full(rows, -1, dtype=torch.int64, device=shape.device)
        self.tracks = {
            name: torch.zeros(rows, dtype=torch.float32, device=shape.device)
            for name in slab.tracks
        }
        self.window: Tensor | None = None
        if slab.window_size:
            queries = (num_slots, shape.num_heads, slab.window_size, shape.head_dim)
            self.window = shape.zeros(*queries)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything allocated for this layer; the first axis is always the slot."""
        tensors = [self.keys, self.values, self.positions, *self.tracks.values()]
        return tensors if self.window is None else [*tensors, self.window]

    def clear(self, slot: int) -> None:
        """Empty a slot.

        Keys and values too: empty rows are masked, but a NaN or an infinity that was left in
        one would get past any mask, since 0 * NaN is NaN.
        """
        self.keys[slot] = 0
        self.values[slot] = 0
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
        num_pads: Rows that a slot has to do without in each layer, ``[layers, S]``: always 0,
            but for plans that study what stored padding does.
        slot_tensors: What else belongs to the slots; the first axis is the slot.
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
        self.num_pads = np.zeros_like(self.rows)
        self.slot_tensors: list[Tensor] = []
        self.transient_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated: slabs, positions, tracks, query windows, and what else slots have."""
        of_layers = sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)
        return of_layers + sum(tensor.nbytes for tensor in self.slot_tensors)

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated, and the largest copy a compaction needed on top."""
        return self.num_bytes + self.transient_bytes

    def clear(self, slot: int) -> None:
        """Empty a slot in all layers."""
        for layer in self.layers:
            layer.clear(slot)
        for tensor in self.slot_tensors:
            tensor[slot] = 0
        self.rows[:, slot] = 0
        self.num_pads[:, slot] = 0
        self.seq_len[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Give the sequence in ``source`` the slot ``target``, and empty ``source``."""
        for layer in self.layers:
            layer.copy_slot(source, target)
        for tensor in self.slot_tensors:
            tensor[target] = tensor[source]
        self.rows[:, target] = self.rows[:, source]
        self.num_pads[:, target] = self.num_pads[:, source]
        self.seq_len[target] = self.seq_len[source]
        self.clear(source)

    def num_free_rows(self, first: int, last: int) -> int:
        """Tokens that every slot of ``[first, last)`` can still take in every layer."""
        free = self.capacity[:, None] - self.num_pads - self.rows
        return int(free[:, first:last].min())
