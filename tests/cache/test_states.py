"""Layers without rows, and states of fixed size: a cache of both, moved, copied and grown."""

from pathlib import Path

import pytest
import torch
from fresh_process import run_fresh

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.layouts.base import PLENTY
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab, StateShape
from kvpolicy.cache.slot_contents import copy_slot, fill_slot
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.compat import has_states
from kvpolicy.errors import KVPolicyError

pytestmark = pytest.mark.skipif(not has_states(), reason="transformers has no cache for states")

CPU = torch.device("cpu")
STATES = (
    StateShape("conv.0", (3, 2), torch.float32),
    StateShape("recurrent.0", (2,), torch.float64),
)
ROWS = LayerShape(2, 2, 4, torch.float32, CPU)
STATE = LayerShape(0, 0, 0, torch.float32, CPU, states=STATES)
BOTH = LayerShape(2, 2, 4, torch.float32, CPU, states=STATES)
NOTHING = LayerShape(0, 0, 0, torch.float32, CPU)
SHAPES = [ROWS, STATE, BOTH, NOTHING]


def run(cache: KVCache, slots: list[int], lengths: list[int], value: float) -> EagerStep:
    """A forward that leaves states of some value; not committed."""
    step = EagerStep(cache, slots, lengths)
    for layer_idx in (0, 2):
        new = torch.randn(len(slots), 2, step.width, 4)
        step.store(layer_idx, new, new)
    for opened in step.states.values():
        opened.update_conv_state(torch.full((len(slots), 3, step.width), value), conv_kernel_size=2)
        opened.update_recurrent_state(torch.full((len(slots), 2), value, dtype=torch.float64))
    return step


@pytest.fixture
def cache() -> KVCache:
    """Four layers: rows, states, both, nothing. Three slots, of which the last is empty."""
    cache = KVCache(SHAPES, [Slab(6)] * 4, 3)
    for slot, (length, value) in enumerate([(4, 10.0), (6, 11.0)]):
        run(cache, [slot], [length], value).commit()
    return cache


def values(cache: KVCache) -> list[list[float]]:
    """What is in the states of each slot, in each layer that has any."""
    found = []
    for layer in cache.states.values():
        conv, recurrent = layer.states["conv.0"], layer.states["recurrent.0"]
        assert (conv == recurrent[:, :1, None]).all()
        found.append(recurrent[:, 0].tolist())
    return found


def test_layers_without_rows_are_never_full(cache: KVCache) -> None:
    assert cache.rows.tolist() == [[4, 6, 0], [0, 0, 0], [4, 6, 0], [0, 0, 0]]
    assert cache.num_free_rows([0, 1, 2]).tolist() == [2, 0, 6]
    assert cache.full([0, 1]).tolist() == [[False, True], [False, False]] * 2
    assert cache.num_candidates([1]).tolist() == [[6], [0], [6], [0]]
    LayerRows(cache, [0, 2], [1, 1]).keep(torch.arange(3).expand(2, 2, -1))
    assert cache.num_free_rows([1]).tolist() == [3]
    cache.drop_unseen([(0, 1), (2, 1)], LayerRows)
    assert values(cache) == [[10, 11, 0]] * 2


def test_a_cache_without_rows_takes_any_number_of_tokens() -> None:
    cache = KVCache([STATE], [Slab(2)], 1)
    assert cache.num_free_rows([0]).tolist() == [PLENTY]


def test_the_bytes_are_those_of_the_shapes(cache: KVCache) -> None:
    assert STATE.state_bytes == 3 * 2 * 4 + 2 * 8
    plain = KVCache([ROWS, ROWS], [Slab(6)] * 2, 3)
    assert cache.num_bytes == plain.num_bytes + 3 * 2 * STATE.state_bytes


def test_static_steps_refuse_layers_without_rows(cache: KVCache) -> None:
    with pytest.raises(KVPolicyError, match=r"layer 1 holds no rows.*eager=True"):
        StaticStep(cache)


def test_a_state_changes_when_its_forward_is_committed(cache: KVCache) -> None:
    step = run(cache, [0], [1], 30.0)
    assert values(cache) == [[10, 11, 0]] * 2
    step.discard()
    assert values(cache) == [[10, 11, 0]] * 2
    step = run(cache, [0], [2], 31.0)
    step.commit()
    assert values(cache) == [[31, 11, 0]] * 2
    assert cache.seq_len.tolist() == [6, 6, 0]


def test_a_forward_goes_on_with_the_states_of_its_slots(cache: KVCache) -> None:
    opened = EagerStep(cache, [1, 0], [1, 1]).states[1]
    full = opened.update_conv_state(torch.full((2, 3, 1), 7.0), conv_kernel_size=2)
    assert full[:, 0].tolist() == [[11, 11, 7], [10, 10, 7]]
    assert opened.recurrent_states[0][:, 0].tolist() == [11, 10]
    first = EagerStep(cache, [2], [1]).states[1]
    assert not first.has_previous_state[0]
    assert first.update_conv_state(torch.ones(1, 3, 1), conv_kernel_size=2).shape[2] == 2


def test_a_forward_that_leaves_other_states_is_noticed(cache: KVCache) -> None:
    opened = EagerStep(cache, [2], [1]).states[1]
    assert "conv.0" in opened.problem
    opened.update_conv_state(torch.ones(1, 3, 1), conv_kernel_size=4)
    opened.update_recurrent_state(torch.ones(1, 2))
    assert "[3, 4]" in opened.problem


def test_pads_are_never_brought_in_beside_states(cache: KVCache) -> None:
    cache.clear(1)
    assert cache.enter_together([1, 2], [3, 3])
    assert not cache.enter_together([1, 2], [3, 2])
    assert not cache.enter_together([0, 2], [1, 1]), "one has begun"
    assert cache.enter_together([0], [2])
    with pytest.raises(AssertionError, match="pad"):
        EagerStep(cache, [1, 2], [3, 2])


def test_what_a_model_does_not_go_on_with_is_brought_in_one_by_one(cache: KVCache) -> None:
    assert cache.most_new([0, 2]).tolist() == [2, 6]
    cache.one_by_one = True
    assert cache.most_new([0, 1, 2]).tolist() == [1, 0, 6]


def test_a_state_goes_where_its_sequence_goes(cache: KVCache) -> None:
    cache.swap(0, 1)
    assert values(cache) == [[11, 10, 0]] * 2
    cache.move(0, 2)
    assert values(cache) == [[0, 10, 11]] * 2
    cache.clear(1)
    assert values(cache) == [[0, 0, 11]] * 2
    assert cache.rows[:, 2].tolist() == [6, 0, 6, 0]


def test_a_state_is_copied_with_its_slot(cache: KVCache) -> None:
    held = copy_slot(cache, 1)
    assert sum(one.nbytes for one in held.tensors) > 2 * STATE.state_bytes
    cache.clear(1)
    fill_slot(cache, 2, held)
    assert values(cache) == [[10, 0, 11]] * 2
    assert cache.seq_len.tolist() == [4, 0, 6]
    other = KVCache(SHAPES, [Slab(6)] * 4, 2)
    other.take(cache, [2, 0])
    assert values(other) == [[11, 10]] * 2
    other.grow([Slab(9)] * 4)
    assert other.capacity.tolist() == [9, 0, 9, 0]
    assert values(other) == [[11, 10]] * 2
    assert torch.equal(other.layers[2].keys[0, :, :6], cache.layers[2].keys[2])


def test_no_token_is_taken_out_of_a_state(cache: KVCache) -> None:
    assert not cache.can_take_back
    assert KVCache([ROWS], [Slab(6)], 1).can_take_back
    with pytest.raises(AssertionError, match="state"):
        copy_slot(cache, 1, seen=4)


def test_a_layout_that_no_layer_needs_is_not_imported(tmp_path: Path) -> None:
    """In a process of its own: each plan brings in its own layout, and no other."""
    code = """
import sys, torch
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import LayerShape, Slab
def names():
    found = [name.rpartition(".")[2] for name in sys.modules if ".cache.layouts." in name]
    return sorted({"no_rows", "prompt_kept", "ragged", "states", "window"} & set(found))
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
