"""Redundancy among keys against its quadratic definition, written in loops."""

from unittest.mock import patch

import pytest
import reference
import torch
from allocations import peak_allocated
from compare import ATOL, heads
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import Drawn, caches, seeds
from torch import Tensor

from kvpolicy.toolkit import key_redundancy, take_rows
from kvpolicy.toolkit.redundancy import Retain

retains = st.sampled_from(["last", "first"])
tile_rows = st.sampled_from([1, 2, 5, 64])


def assert_equals_the_definition(
    keys: Tensor, threshold: float, retain: Retain, tile_rows: int
) -> None:
    # So few bytes that heads are compared one after the other, as many heads are.
    few_bytes = patch("kvpolicy.toolkit.redundancy._CPU_TILE_BYTES", 4 * tile_rows * keys.shape[2])
    with patch("kvpolicy.toolkit.redundancy._TILE_ROWS", tile_rows), few_bytes:
        ours = key_redundancy(keys, threshold=threshold, retain=retain)
    for b, h, rows, _ in heads(keys, keys):
        expected = reference.redundancy(
            rows, similarity_threshold=threshold, retain_direction=retain
        )
        torch.testing.assert_close(
            ours[b, h].double(), torch.tensor(expected).double(), atol=ATOL, rtol=0
        )


@given(caches(min_rows=1), st.sampled_from([-0.9, 0.2, 0.5, 0.9]), retains, tile_rows)
def test_redundancy_equals_the_quadratic_definition(
    drawn: Drawn, threshold: float, retain: Retain, tile_rows: int
) -> None:
    assert_equals_the_definition(drawn.keys, threshold, retain, tile_rows)


@given(seeds, st.integers(1, 40), st.sampled_from([0.0, 0.25, 0.5, 0.75]), retains, tile_rows)
def test_similarities_at_the_threshold_and_equal_keys_equal_the_definition(
    seed: int, num_rows: int, threshold: float, retain: Retain, tile_rows: int
) -> None:
    # Keys with four entries of 1 or -1, or without any: similarities are exact multiples of
    # 0.25, and many are equal.
    rng = torch.Generator().manual_seed(seed)
    places = torch.rand(2, 1, num_rows, 6, generator=rng).argsort(dim=3)[..., :4]
    signs = torch.randint(-1, 1, places.shape, generator=rng) * 2.0 + 1
    keys = torch.zeros(2, 1, num_rows, 6).scatter_(3, places, signs)
    keys *= torch.rand(2, 1, num_rows, 1, generator=rng) < 0.9
    assert_equals_the_definition(keys, threshold, retain, tile_rows)


@pytest.mark.parametrize("threshold", [-1.0, 0.3, 0.99])
def test_many_rows_equal_the_definition(threshold: float) -> None:
    # Above 0.99 no two rows are similar, above -1 all are, each to itself included.
    keys = torch.randn(1, 1, 130, 8, generator=torch.Generator().manual_seed(0))
    assert_equals_the_definition(keys, threshold, "last", tile_rows=64)


@example(0, 130)
@given(seeds, st.integers(1, 70))
def test_batch_equals_single_sequences(seed: int, num_rows: int) -> None:
    keys = torch.randn(3, 2, num_rows, 4, generator=torch.Generator().manual_seed(seed))
    together = key_redundancy(keys, threshold=0.5)
    alone = [key_redundancy(one[None], threshold=0.5) for one in keys]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-7, rtol=0)


def test_a_key_that_is_not_finite_is_not_hidden() -> None:
    keys = torch.ones(1, 1, 5, 4)
    keys[0, 0, 2] = torch.inf
    assert key_redundancy(keys, threshold=0.5).isnan().all()


@pytest.mark.parametrize("num_rows", [1024, 4096])
@pytest.mark.parametrize("retain", ["last", "first"])
def test_memory_grows_with_the_rows_not_with_their_square(num_rows: int, retain: Retain) -> None:
    keys = torch.randn(1, 2, num_rows, 64, generator=torch.Generator().manual_seed(0))
    peak = peak_allocated(lambda: key_redundancy(keys, threshold=0.5, retain=retain))
    # Unit keys, and at most two and a half more tensors or tiles of their size.
    assert keys.nbytes <= peak <= 3.5 * keys.nbytes


@given(st.data(), seeds)
def test_taken_rows_are_those_of_the_order(data: st.DataObject, seed: int) -> None:
    shape = data.draw(st.tuples(*[st.integers(1, 4)] * 4))
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=rng)
    if data.draw(st.booleans()):  # the rows that a slab holds are a part of it
        rows = torch.cat([rows, rows + 1], dim=2)[:, :, : shape[2]]
    order = torch.randint(shape[2], (*shape[:2], data.draw(st.integers(0, 5))), generator=rng)
    taken = take_rows(rows, order)
    assert taken.shape == (*order.shape, shape[3])
    for b, h, k in torch.cartesian_prod(*[torch.arange(n) for n in order.shape]).tolist():
        assert torch.equal(taken[b, h, k], rows[b, h, order[b, h, k]])
