"""What a layout of another file needs: a state without rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from fresh_process import run_fresh
from torch import Tensor

from kvpolicy.cache.arena import Arena
from kvpolicy.cache.contents import Contents
from kvpolicy.cache.counts import Counts
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.layouts.base import PLENTY, Layer, Layout
from kvpolicy.cache.layouts.compose import layouts_of
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.cache.slot_contents import copy_slot, fill_slot
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import KVPolicyError


def test_static_steps_refuse_layers_without_rows(cache: KVCache) -> None:
    with pytest.raises(KVPolicyError, match=r"layer 1 holds no rows.*eager=True"):
        StaticStep(cache)


class StateContents(Contents):
    """A copied state."""

    def __init__(self, state: Tensor) -> None:
        self.state = state

    @property
    def tensors(self) -> list[Tensor]:
        return [self.state]

    def to(self, device: torch.device) -> Self:
        return type(self)(self.state.to(device))


class StateStack(Arena):
    """A state ``[M]`` of each slot."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.states = self.shape.zeros(self.num_layers * self.num_slots, self.shape.head_dim)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.states]

    def clear(self, slot: int) -> None:
        self.of_slot(self.states, slot).zero_()


class States(Layout):
    """Layers with a state of fixed size, and no rows."""

    def fit(self, shape: LayerShape, slab: Slab) -> Slab:
        return Slab(0)

    def new_arena(self, *given: Any) -> Arena:
        return StateStack(*given)

    def new_layer(self, index: int, arena: Arena, place: int) -> Layer:
        return Layer(index, arena, place)

    def room(self, slots: Sequence[int]) -> np.ndarray:
        return np.full((len(self.layers), len(slots)), PLENTY)

    def full(self, slots: Sequence[int]) -> np.ndarray:
        return np.zeros((len(self.layers), len(slots)), dtype=bool)

    def copy(self, layer: Layer, slot: int, newest: int | None, without: int) -> Contents:
        assert newest is None
        assert not without
        return StateContents(layer.tensors[0][slot].clone())

    def fill(self, layer: Layer, slot: int, contents: Contents) -> None:
        layer.tensors[0][slot] = contents.tensors[0]


def compose(shapes: Sequence[LayerShape], slabs: Sequence[Slab], counts: Counts) -> list[Layout]:
    """Layers with an odd number have states."""
    states = States(counts)
    rows = layouts_of(shapes, slabs, counts)
    return [states if layer_idx % 2 else layout for layer_idx, layout in enumerate(rows)]


def states_of(cache: KVCache) -> list[list[float]]:
    """The state of each slot in each layer that has one."""
    return [cache.layers[layer_idx].tensors[0][:, 0].tolist() for layer_idx in (1, 3)]


@pytest.fixture
def cache() -> KVCache:
    """Four layers, every second with a state; three slots, of which the last is empty."""
    shape = LayerShape(2, 2, 4, torch.float32, torch.device("cpu"))
    cache = KVCache([shape] * 4, [Slab(6)] * 4, 3, compose)
    step = EagerStep(cache, [0, 1], [4, 6])
    for layer_idx in (0, 2):
        new = torch.randn(2, 2, 6, 4)
        step.store(layer_idx, new, new)
    for layer_idx, first in ((1, 10.0), (3, 20.0)):
        cache.layers[layer_idx].tensors[0][:] = torch.tensor([[first], [first + 1], [0]])
    step.commit()
    return cache


def test_a_state_is_never_full_and_has_no_rows(cache: KVCache) -> None:
    assert cache.rows.tolist() == [[4, 6, 0], [0, 0, 0], [4, 6, 0], [0, 0, 0]]
    assert cache.num_free_rows([0, 1, 2]).tolist() == [2, 0, 6]
    assert cache.full([0, 1]).tolist() == [[False, True], [False, False]] * 2
    assert cache.num_candidates([1]).tolist() == [[6], [0], [6], [0]]
    assert cache.num_bytes == sum(layer.num_bytes for layer in cache.layers)
    LayerRows(cache, [0, 2], [1, 1]).keep(torch.arange(3).expand(2, 2, -1))
    assert cache.num_free_rows([1]).tolist() == [3]
    cache.drop_unseen([(0, 1), (2, 1)], LayerRows)
    assert states_of(cache) == [[10, 11, 0], [20, 21, 0]]


def test_a_state_goes_where_its_sequence_goes(cache: KVCache) -> None:
    cache.swap(0, 1)
    assert states_of(cache) == [[11, 10, 0], [21, 20, 0]]
    cache.move(0, 2)
    assert states_of(cache) == [[0, 10, 11], [0, 20, 21]]
    cache.clear(1)
    assert states_of(cache) == [[0, 0, 11], [0, 0, 21]]
    assert cache.rows[:, 2].tolist() == [6, 0, 6, 0]


def test_a_state_is_copied_with_its_slot(cache: KVCache) -> None:
    held = copy_slot(cache, 1)
    cache.clear(1)
    fill_slot(cache, 2, held)
    assert states_of(cache) == [[10, 0, 11], [20, 0, 21]]
    assert cache.seq_len.tolist() == [4, 0, 6]
    shapes = [layer.shape for layer in cache.layers]
    wider = KVCache(shapes, [Slab(6)] * 4, 2, compose)
    wider.take(cache, [2, 0])
    assert states_of(wider) == [[11, 10], [21, 20]]
    wider.grow([Slab(9)] * 4)
    assert wider.capacity.tolist() == [9, 0, 9, 0]
    assert states_of(wider) == [[11, 10], [21, 20]]
    assert torch.equal(wider.layers[2].keys[0, :, :6], cache.layers[2].keys[2])


def test_a_layout_that_no_layer_needs_is_not_imported(tmp_path: Path) -> None:
    """In a process of its own: each plan brings in its own layout, and no other."""
    code = """
import sys, torch
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import LayerShape, Slab
def names():
    found = [name.rpartition(".")[2] for name in sys.modules if ".cache.layouts." in name]
    return sorted({"ragged", "window", "prompt_kept"} & set(found))
plain, shared, kept = Slab(4), Slab(4, ragged=True), Slab(4, room=2)
for window, slab in ((None, plain), (None, shared), (3, plain), (None, kept)):
    KVCache([LayerShape(2, 2, 4, torch.float32, torch.device("cpu"), window)], [slab], 1)
    print(*names())
"""
    done = run_fresh(code, folder=tmp_path)
    assert done.out.split("\n")[:4] == [
        "",
        "ragged",
        "ragged window",
        "prompt_kept ragged window",
    ]
