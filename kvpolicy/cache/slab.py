"""Slots and slabs: keys and values of all sequences, allocated once, compacted in place.

Every sequence owns one slot. In each layer a slot is a slab of ``capacity`` rows; the first
``rows`` of them hold tokens, in order of their positions, the rest are empty. Slots in use
are always the first ones, so that every forward works on a plain slice of the slabs.
"""

import sys
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.softmax import PLAIN
from kvpolicy.model.peers import SINGLE, TensorParallelGroup

# The track that attention fills by itself, for policies that name it as an argument.
ATTN_SUMS = "attn_sums"

# From a layer, keys [B, H_kv, K, D] and positions to add, [B, H_kv, K], the moved keys.
Rotate = Callable[[int, Tensor, Tensor], Tensor]


@attrs.frozen
class LayerShape:
    """What one layer's keys and values look like, where they live, how far queries look back.

    Attributes:
        num_heads: Query heads of this process.
        num_kv_heads: Key/value heads of this process.
        head_dim: Size of one head.
        dtype: Precision of keys and values.
        device: Where they live.
        sliding_window: Tokens a query sees, its own included: the query of position p sees
            rows at positions above ``p - sliding_window``. ``None``: all before it.
        peers: The processes that have the other heads, in the order of the heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None = None
    peers: TensorParallelGroup = SINGLE

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of one token in this layer, in all heads."""
        return 2 * self.peers.size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

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
        softmax: How the layer turned logits into weights in its last forward.
    """

    def __init__(self, shape: LayerShape, slab: Slab, num_slots: int) -> None:
        """Allocate the slabs; those of a sliding window have no more rows than the window."""
        self.shape = shape
        most = shape.sliding_window or slab.capacity
        slab = attrs.evolve(slab, capacity=min(slab.capacity, most))
        self.slab = slab
        self.softmax = PLAIN
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
    def slides(self) -> bool:
        """Whether the slab holds a whole sliding window: then every token finds room."""
        return self.slab.capacity == self.shape.sliding_window

    @property
    def tensors(self) -> list[Tensor]:
        """Everything allocated for this layer; the first axis is always the slot."""
        tensors = [self.keys, self.values, self.positions, *self.tracks.values()]
        return tensors if self.window is None else [*tensors, self.window]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for this layer."""
        return sum(tensor.nbytes for tensor in self.tensors)

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

    def grown(self, slab: Slab) -> "LayerCache":
        """The same rows in a larger slab."""
        larger = LayerCache(self.shape, slab, len(self.keys))
        larger.softmax = self.softmax
        for old, new in zip(self.tensors, larger.tensors, strict=True):
            new[:, :, : old.shape[2]] = old
        return larger

    def copy_slot(self, source: int, target: int) -> None:
        """Make ``target`` hold what ``source`` holds."""
        for tensor in self.tensors:
            tensor[target] = tensor[source]


class Cache:
    """The slabs of all layers, and how far each slot is filled.

    Attributes:
        layers: One `LayerCache` for each decoder layer.
        rows: Rows held in each layer by each slot, ``[layers, S]``.
        capacity: Rows allocated for each slot in each layer, ``[layers]``.
        slides: Whether a layer holds a whole sliding window, ``[layers]``: full slabs of such
            a layer need no compaction, for with every token one leaves the window.
        has_gaps: Whether a slot was ever compacted in a layer, ``[layers, S]``; if not, its
            rows are its newest tokens, one after another.
        seq_len: Tokens each slot's sequence has seen, ``[S]``.
        num_pads: Rows that a slot has to do without in each layer, ``[layers, S]``: always 0,
            but for plans that study what stored padding does.
        slot_tensors: What else belongs to the slots; the first axis is the slot.
        transient_bytes: The largest copy needed so far to move rows: by a compaction, where a
            window slides, or where slabs grow.
        rotate: Moves keys of a layer to other positions; ``None`` if rows belong to no model.
    """

    def __init__(self, shapes: Sequence[LayerShape], slabs: Sequence[Slab], num_slots: int) -> None:
        self.num_slots = num_slots
        self.layers = [
            LayerCache(shape, slab, num_slots) for shape, slab in zip(shapes, slabs, strict=True)
        ]
        self.capacity = np.array([layer.slab.capacity for layer in self.layers], dtype=np.int64)
        self.slides = np.array([layer.slides for layer in self.layers], dtype=bool)
        self.rows = np.zeros((len(self.layers), num_slots), dtype=np.int64)
        self.has_gaps = np.zeros(self.rows.shape, dtype=bool)
        self.seq_len = np.zeros(num_slots, dtype=np.int64)
        self.num_pads = np.zeros_like(self.rows)
        self.slot_tensors: list[Tensor] = []
        self.transient_bytes = 0
        self.rotate: Rotate | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes allocated: slabs, positions, tracks, query windows, and what else slots have."""
        of_layers = sum(layer.num_bytes for layer in self.layers)
        return of_layers + sum(tensor.nbytes for tensor in self.slot_tensors)

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated, and the largest copy that was needed on top."""
        return self.num_bytes + self.transient_bytes

    def grow(self, slabs: Sequence[Slab]) -> None:
        """Bring layers to the capacity of their new slab, one at a time; none ever shrinks."""
        for layer_idx, slab in enumerate(slabs):
            small = self.layers[layer_idx]
            if slab.capacity > small.slab.capacity and not small.slides:
                larger = self.layers[layer_idx] = small.grown(slab)
                self.capacity[layer_idx] = larger.slab.capacity
                self.slides[layer_idx] = larger.slides
                self.transient_bytes = max(self.transient_bytes, small.num_bytes)

    def clear(self, slot: int) -> None:
        """Empty a slot in all layers."""
        for layer in self.layers:
            layer.clear(slot)
        for tensor in self.slot_tensors:
            tensor[slot] = 0
        self.rows[:, slot] = 0
        self.has_gaps[:, slot] = False
        self.num_pads[:, slot] = 0
        self.seq_len[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Give the sequence in ``source`` the slot ``target``, and empty ``source``."""
        for layer in self.layers:
            layer.copy_slot(source, target)
        for tensor in self.slot_tensors:
            tensor[target] = tensor[source]
        self.rows[:, target] = self.rows[:, source]
        self.has_gaps[:, target] = self.has_gaps[:, source]
        self.num_pads[:, target] = self.num_pads[:, source]
        self.seq_len[target] = self.seq_len[source]
        self.clear(source)

    def num_free_rows(self, first: int, last: int) -> int:
        """Tokens that every slot of ``[first, last)`` can still take in every layer.

        Layers that slide take any number.
        """
        free = self.capacity[:, None] - self.num_pads - self.rows
        return int(free[~self.slides, first:last].min(initial=sys.maxsize))

    def full(self, first: int, last: int) -> np.ndarray:
        """Which slots of ``[first, last)`` cannot take another token, bool ``[layers, B]``."""
        room = self.capacity[:, None] - self.num_pads[:, first:last]
        full: np.ndarray = (self.rows[:, first:last] >= room) & ~self.slides[:, None]
        return full

    def needed_copy(self, num_bytes: int) -> None:
        """Note that rows were copied to be moved."""
        self.transient_bytes = max(self.transient_bytes, num_bytes)
