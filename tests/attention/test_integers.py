"""Rows in integers against loops: their bytes, what these stand for, and attention over them."""

import integer_reference as reference
import pytest
import torch
from decode_cases import cases
from hypothesis import given
from hypothesis import strategies as st
from integer_cases import BITS, PAIRS, check_integers, check_integers_in_segments, number_rows
from strategies import seeds
from torch import Tensor

from kvpolicy.attention.base import DecodeLayer
from kvpolicy.attention.choose import backend_for
from kvpolicy.attention.integers import bytes_of_row, dequantize, quantize
from kvpolicy.attention.torch_backend.backend import FixedShapesBackend, TorchBackend

CPU = torch.device("cpu")
SIZES = [1, 9, 70, 300]  # some rows are attended to in parts
BACKENDS = {
    "torch": lambda _: TorchBackend(),
    "cpu": lambda dtype: backend_for(CPU, dtype),
    "fixed shapes": lambda _: FixedShapesBackend(),
    "in a graph": lambda dtype: backend_for(CPU, dtype, in_graph=True),
}


@pytest.mark.parametrize("bits", BITS)
@given(number_rows())
def test_bytes_are_those_of_loops(bits: int, given: Tensor) -> None:
    dim = given.shape[1]
    found = quantize(given, bits)
    assert found.tolist() == [reference.stored(row, bits) for row in given.tolist()]
    assert found.shape[1] == bytes_of_row(dim, bits)
    wanted = torch.tensor([reference.numbers(row, dim, bits) for row in found.tolist()])
    torch.testing.assert_close(
        dequantize(found, dim, bits, torch.float32), wanted, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("bits", BITS)
@given(number_rows())
def test_a_number_changes_by_half_a_step_at_most(bits: int, given: Tensor) -> None:
    """A step is the extent of its group by the number of codes, and as much more as bf16 rounds."""
    found = dequantize(quantize(given, bits), given.shape[1], bits, torch.float32)
    size = reference.group_of(given.shape[1], bits)
    groups, changed = (one.unflatten(1, (-1, size)) for one in (given, (found - given).abs()))
    least, most = groups.aminmax(dim=2, keepdim=True)
    extent = (most - least + least.abs() / 64) * (1 + 1 / 64)
    rounding = 1e-6 * torch.maximum(least.abs(), most.abs())  # of sums in fp32
    assert (changed <= extent / (2**bits - 1) / 2 + rounding).all()


@pytest.mark.parametrize("bits", BITS)
@given(number_rows(), st.integers(0, 2))
def test_a_row_does_not_depend_on_others(bits: int, given: Tensor, number: int) -> None:
    number %= len(given)
    assert torch.equal(quantize(given, bits)[number], quantize(given[number], bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_made_finite(bits: int, number: float) -> None:
    given = torch.ones(2, 64)
    given[1, 40] = number
    found = dequantize(quantize(given, bits), 64, bits, torch.float32)
    assert torch.equal(found[0], given[0])
    assert not found[1, 32:].isfinite().any()


@pytest.mark.parametrize("bits", BITS)
def test_empty_rows_are_zeros(bits: int) -> None:
    empty = torch.zeros(3, bytes_of_row(64, bits), dtype=torch.uint8)
    assert torch.equal(dequantize(empty, 64, bits, torch.float32), torch.zeros(3, 64))
    assert torch.equal(quantize(torch.zeros(3, 64), bits), empty)


def test_bytes_of_a_row() -> None:
    assert [bytes_of_row(64, bits) for bits in BITS] == [64 + 4, 32 + 2 * 4]
    assert [bytes_of_row(20, bits) for bits in BITS] == [20 + 4, 10 + 5 * 4]


# Attention


@pytest.mark.parametrize("name", BACKENDS)
@given(cases(adjacent=True, capacities=SIZES), st.sampled_from(PAIRS))
def test_decode_attends_to_integers_as_loops_do(name, case, bits) -> None:
    check_integers(case, bits, BACKENDS[name](case.dtype))


@pytest.mark.parametrize("name", BACKENDS)
@given(cases(adjacent=True, capacities=SIZES), st.sampled_from(PAIRS), st.integers(1, 40))
def test_decode_reads_the_newest_rows_exactly_as_loops_do(name, case, bits, exact) -> None:
    check_integers(case, bits, BACKENDS[name](case.dtype), exact)


@pytest.mark.parametrize("name", BACKENDS)
@given(cases(slides=True, adjacent=True), st.sampled_from(PAIRS), st.sampled_from([0, 1, 30]))
def test_a_full_window_of_integers_drops_its_oldest_row(name, case, bits, exact) -> None:
    check_integers(case, bits, BACKENDS[name](case.dtype), exact)


@pytest.mark.parametrize("name", BACKENDS)
@given(
    cases(slides=False, adjacent=True),
    st.integers(1, 4),
    st.sampled_from(PAIRS),
    st.sampled_from([0, 1, 30]),
)
def test_decode_attends_to_integers_in_segments_as_loops_do(
    name, case, num_free, bits, exact
) -> None:
    check_integers_in_segments(case, num_free, bits, BACKENDS[name](case.dtype), exact)


@given(
    cases(adjacent=True, capacities=SIZES, dims=[16, 80, 128], groups=[2, 5, 7]),
    st.sampled_from(PAIRS),
    st.sampled_from([0, 1, 30]),
)
def test_decode_attends_to_heads_and_groups_of_other_sizes_as_loops_do(case, bits, exact) -> None:
    check_integers(case, bits, backend_for(CPU, case.dtype), exact)


@given(
    st.sampled_from([1, 70, 300]),
    st.sampled_from([(16, 1), (64, 3), (80, 5), (128, 4)]),
    st.sampled_from([0.0, 3.0, -200.0]),
    seeds,
)
def test_logits_of_codes_are_as_exact_as_sums_in_fp32(num_rows, sizes, around, seed) -> None:
    """A logit is off by a share of its largest terms, and an output by twice as much of a value."""
    (dim, group), rng = sizes, torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, 1, num_rows, dim, generator=rng) for _ in range(2))
    keys += around
    query = torch.randn(1, group, dim, generator=rng)
    stored = [quantize(one, 8) for one in (keys, values)]
    counts = torch.tensor([[num_rows - 1]]), torch.tensor([num_rows - 1]), torch.tensor([True])
    positions = torch.arange(num_rows).view(1, 1, -1)
    layer = DecodeLayer(*stored, positions, *counts, key_bits=8, value_bits=8)
    new = {"query": query, "key": keys[:, :, -1], "value": values[:, :, -1]}
    found = backend_for(CPU, torch.float32).bind(layer)(**new, scaling=dim**-0.5)[0]

    rows, of_rows = (dequantize(one[0, 0], dim, 8, torch.float64) for one in stored)
    logits = query[0].double() @ rows.T * dim**-0.5
    wanted = logits.softmax(dim=-1) @ of_rows
    steps, least = stored[0][0, 0, :, dim:].contiguous().view(torch.bfloat16).double().unbind(-1)
    terms = query[0].double().abs().sum(-1).max() * (least.abs() + 255 * steps).max() * dim**-0.5
    assert (found - wanted).abs().max() <= (2 * terms + 1) * 1e-6 * of_rows.abs().max()
