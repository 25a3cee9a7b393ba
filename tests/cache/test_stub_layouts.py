"""What a layout or a store of another file needs: rows in 8 bits, and a state without rows.

The stores round numbers, so what they give is compared with a store of full precision that rounds
alike: tokens and kept rows are equal to the bit, in every layout.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from families import family_model
from fresh_process import run_fresh
from tiny import tiny_model
from torch import Tensor

from kvpolicy import Engine, Plan, Request
from kvpolicy.cache.arena import Arena
from kvpolicy.cache.contents import Contents
from kvpolicy.cache.counts import Counts
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.layouts.base import PLENTY, Layer, Layout, RowLayout
from kvpolicy.cache.layouts.compose import layouts_of
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.cache.slot_contents import copy_slot, fill_slot
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.cache.store import RowStore
from kvpolicy.errors import KVPolicyError


class Int8Store(RowStore):
    """Codes ``[N, H_kv, R, D]`` and a power of 2 ``[N, H_kv, R, 1]`` for each row."""

    is_plain = False

    @classmethod
    def allocate(cls, shape: LayerShape, num_slots: int, capacity: int) -> Self:
        size = (num_slots, shape.num_kv_heads, capacity)

        def side() -> list[Tensor]:
            return [torch.zeros(*size, shape.head_dim, dtype=torch.int8), torch.zeros(*size, 1)]

        return cls(shape, side(), side())

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        largest = rows.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-20)
        scale = (largest / 127).log2().ceil().exp2()
        return (rows.float() / scale).round().to(torch.int8), scale

    def decode(self, stored: Sequence[Tensor]) -> Tensor:
        return (stored[0].float() * stored[1]).to(self.shape.dtype)


class RoundedStore(RowStore):
    """Full precision, of what `Int8Store` would have given."""

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        int8 = Int8Store(self.shape, [], [])
        return super().encode(int8.decode(int8.encode(rows)))


PLANS = {
    "even": Plan.uniform("h2o", budget=12, buffer=5),
    "queries": Plan.uniform("snapkv", budget=12, buffer=5),
    "ragged": Plan.uniform("h2o", budget=12, buffer=5, heads="shared"),
    "prompt kept": Plan.uniform("h2o", budget=9, buffer=5, prompt="keep"),
    "window": Plan.uniform("streaming", budget=12, buffer=5),
    "a whole window": Plan.uniform("full"),
    "rows replaced": Plan.uniform("h2o", "merge", budget=12, buffer=5),
    "lookaheads": Plan.uniform("laq", budget=12, buffer=5),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", PLANS)
def test_rows_in_8_bits_run_in_every_layout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("mistral", window=20) if "window" in kind else tiny_model()
    prompts = [[5, 6, 7, 8] * 6, [9, 3, 1] * 4, [11] * 30]
    found = []
    for store in (Int8Store, RoundedStore):
        monkeypatch.setattr(RowLayout, "store", store)
        engine = Engine(model, None, PLANS[kind], slots=2, chunk=7, eager=True)
        requests = [Request(one, 20, stop_ids=(), snapshot=True) for one in prompts]
        results = engine.generate(requests).results()
        again = engine.generate([one.snapshot for one in results], max_new_tokens=6).results()
        held = [
            (one.positions, one.keys, one.values)
            for result in results
            if result.snapshot
            for one in result.snapshot.contents.layers
        ]
        evicted = [one.rows_evicted for one in results]
        tokens = [list(one.tokens) for one in (*results, *again)]
        found.append((tokens, evicted, held))
    (tokens, evicted, held), (expected, gone, rows) = found
    assert len(tokens[0]) == 20
    assert tokens == expected
    assert evicted == gone
    assert bool(max(evicted)) == (kind != "a whole window")
    assert all(map(torch.equal, sum(held, ()), sum(rows, ())))
    assert len(held) == 6


def test_static_steps_refuse_what_their_kernels_cannot_read(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KVPolicyError, match=r"layer 1 holds no rows.*eager=True"):
        StaticStep(cache)
    monkeypatch.setattr(RowLayout, "store", Int8Store)
    with pytest.raises(KVPolicyError, match=r"layer 0 stores rows in another form.*eager=True"):
        Engine(tiny_model(), plan=PLANS["even"])


def test_a_slot_of_8_bits_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for store in (Int8Store, RowStore):
        monkeypatch.setattr(RowLayout, "store", store)
        shape = LayerShape(2, 2, 64, torch.float32, torch.device("cpu"))
        sizes.append(KVCache([shape], [Slab(10)], 3).num_bytes)
    positions = 3 * 2 * 10 * 8
    assert [size - positions for size in sizes] == [3 * 2 * 10 * 2 * (64 + 4), 3 * 2 * 10 * 2 * 256]


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
