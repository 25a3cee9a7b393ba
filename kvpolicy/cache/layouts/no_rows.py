"""Layers without attention, or that attend to the rows of others: no token ever fills them."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kvpolicy.cache.arena import Arena
from kvpolicy.cache.contents import LayerContents
from kvpolicy.cache.layouts.base import PLENTY, Layer, Layout
from kvpolicy.cache.shape import LayerShape, Slab


class NoRows(Layout):
    """Layers that hold nothing, or states only (see `kvpolicy.cache.layouts.states`)."""

    def fit(self, shape: LayerShape, slab: Slab) -> Slab:
        """No row, whatever is wanted."""
        del shape, slab
        return Slab(0)

    def new_arena(self, shape: LayerShape, slab: Slab, num_layers: int, num_slots: int) -> Arena:
        """Nothing is allocated."""
        return EmptyArena(shape, slab, num_layers, num_slots)

    def new_layer(self, index: int, arena: Arena, place: int) -> Layer:
        """A layer without rows."""
        return Layer(index, arena, place)

    def room(self, slots: Sequence[int]) -> np.ndarray:
        """Any number of tokens."""
        return np.full((len(self.layers), len(slots)), PLENTY)

    def full(self, slots: Sequence[int]) -> np.ndarray:
        """Never."""
        return np.zeros((len(self.layers), len(slots)), dtype=bool)

    def copy(self, layer: Layer, slot: int, newest: int | None, without: int) -> LayerContents:
        """No rows."""
        del slot, newest, without
        return LayerContents.without_rows(layer.shape)

    def fill(self, layer: Layer, slot: int, contents: LayerContents) -> None:
        """Nothing is put back."""


class EmptyArena(Arena):
    """The memory of layers that hold no rows: none."""

    @property
    def tensors(self) -> list[Tensor]:
        """None."""
        return []

    def clear(self, slot: int) -> None:
        """Nothing is there."""
