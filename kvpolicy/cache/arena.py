"""The memory of layers of equal kind, allocated once.

Every sequence owns one slot. In each layer a slot has a slab of ``capacity`` rows; which of them
hold tokens is the business of the layer's layout, see `kvpolicy.cache.layouts.base`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.cache.store import RowStore
from kvpolicy.devices import upload


def slot_index(slots: Sequence[int] | np.ndarray) -> slice | list[int]:
    """An index of slots: those in equal steps as a slice, which is read as a view."""
    if len(slots) == 0:
        return []
    if isinstance(slots, range) and slots.step > 0:
        return slice(slots.start, slots.stop, slots.step)
    first, last = slots[0], slots[-1]
    step = slots[1] - first if len(slots) > 1 else 1
    evenly = range(first, last + 1, step) if step > 0 else ()
    return slice(first, last + 1, step) if list(slots) == list(evenly) else list(slots)


def index_on(device: torch.device, slots: Sequence[int] | np.ndarray) -> slice | Tensor:
    """An index of slots for tensors of a device, for which nobody waits."""
    index = slot_index(slots)
    return index if isinstance(index, slice) else upload(np.asarray(slots, np.int64), device)


class Arena(ABC):
    """What layers of equal kind hold, in one tensor for all of them or in several.

    Layers and slots share the first axis, so that a compaction can treat the slots of several
    layers as a batch: layer ``i`` of the arena has its slots at ``[i * S, (i + 1) * S)``.

    Attributes:
        shape: Shape of each layer.
        slab: What each layer stores for a slot.
        num_layers: Layers of the arena.
        num_slots: Slots, ``S``.
    """

    def __init__(self, shape: LayerShape, slab: Slab, num_layers: int, num_slots: int) -> None:
        self.shape, self.slab = shape, slab
        self.num_layers, self.num_slots = num_layers, num_slots

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Everything allocated; the first axis is always layers and slots."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Empty a slot in all layers."""

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the contents of slot ``source`` to slot ``target`` in all layers."""
        for tensor in self.tensors:
            self.of_slot(tensor, target).copy_(self.of_slot(tensor, source))

    def swap_slots(self, first: int, second: int) -> int:
        """Exchange two slots in all layers; returns the bytes of the largest temporary copy."""
        most = 0
        for tensor in self.tensors:
            held = self.of_slot(tensor, first).clone()
            self.of_slot(tensor, first).copy_(self.of_slot(tensor, second))
            self.of_slot(tensor, second).copy_(held)
            most = max(most, held.nbytes)
        return most

    def of_slot(self, tensor: Tensor, slot: int) -> Tensor:
        """A slot in all layers, a view."""
        return tensor[slot :: self.num_slots]


class SlabArena(Arena):
    """The slabs of layers of equal shape.

    Attributes:
        store: Keys and values of the rows.
        positions: Position of each row's token in its sequence, ``[layers * S, H_kv, capacity]``,
            int64, strictly rising along the rows, -1 where empty.
        tracks: Per-row numbers by name, ``[layers * S, H_kv, capacity]``, fp32, 0 where empty.
        window: The last queries after RoPE, ``[layers * S, H_q, W, D]``: the query at position p
            is stored at index ``p % W``. ``None`` if no policy reads queries.
        tables: What the layout of these layers knows of each slot, ``[layers * S, ...]``, by name.
    """

    def __init__(
        self,
        shape: LayerShape,
        slab: Slab,
        num_layers: int,
        num_slots: int,
        empty: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Allocate the slabs.

        Args:
            shape: Shape of each layer.
            slab: What each layer stores for a slot.
            num_layers: Layers of the arena.
            num_slots: Slots.
            empty: The tables of an empty slot, by name.
        """
        super().__init__(shape, slab, num_layers, num_slots)
        num = num_layers * num_slots
        self.store = RowStore.allocate(shape, slab, num)
        rows = (num, shape.num_kv_heads, slab.capacity)
        self.positions = torch.full(rows, -1, dtype=torch.int64, device=shape.device)
        self.tracks = {
            name: torch.zeros(rows, dtype=torch.float32, device=shape.device)
            for name in slab.tracks
        }
        self.window: Tensor | None = None
        if slab.window_size:
            self.window = shape.zeros(num, shape.num_heads, slab.window_size, shape.head_dim)
        self._empty = dict(empty or {})
        self.tables = {
            name: one.expand(num, *one.shape).clone() for name, one in self._empty.items()
        }

    @property
    def keys(self) -> Tensor:
        """Keys after RoPE, ``[layers * S, H_kv, capacity, D]``."""
        return self.store.keys.decode(self.store.keys.slab)

    @property
    def values(self) -> Tensor:
        """Values, likewise."""
        return self.store.values.decode(self.store.values.slab)

    @property
    def slabs(self) -> list[Tensor]:
        """What has a place for every row, as it is stored."""
        return [*self.store.slabs, self.positions, *self.tracks.values()]

    @property
    def tensors(self) -> list[Tensor]:
        """Everything allocated; the first axis is always layers and slots."""
        queries = [] if self.window is None else [self.window]
        return [*self.slabs, *self.store.exact.values(), *queries, *self.tables.values()]

    def clear(self, slot: int) -> None:
        """Empty a slot in all layers.

        Keys and values are zeroed, too: empty rows are masked, but a NaN or an infinity in one
        would pass any mask, since 0 * NaN is NaN.
        """
        for tensor in (*self.store.slabs, *self.store.exact.values(), *self.tracks.values()):
            self.of_slot(tensor, slot).zero_()
        self.of_slot(self.positions, slot).fill_(-1)
        for name, empty in self._empty.items():
            self.of_slot(self.tables[name], slot).copy_(empty)
