"""Rows in integers against loops: their bytes, what these stand for, and attention over them."""

import itertools
from collections.abc import Iterator

import attrs
import integer_reference as reference
import pytest
import torch
from decode_cases import TOLERANCE, Case, RaggedCase, assert_as_expected, cases, expected
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds
from torch import Tensor

from kvpolicy.attention.base import AttentionBackend, DecodeLayer
from kvpolicy.attention.choose import backend_for
from kvpolicy.attention.integers import bytes_of_row, dequantize, quantize
from kvpolicy.attention.torch_backend.backend import TorchBackend

CPU = torch.device("cpu")
BITS = (8, 4)
# Bits of keys and of values; 0: numbers as they are.
PAIRS = [(8, 8), (8, 4), (4, 4), (0, 8), (4, 0)]
SIZES = [1, 9, 70, 300]  # some rows are attended to in parts
BACKENDS = {
    "torch": lambda _: TorchBackend(),
    "cpu": lambda dtype: backend_for(CPU, dtype),
    "in a graph": lambda dtype: backend_for(CPU, dtype, in_graph=True),
}


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Rows of some size and scale, around some number."""
    size = draw(st.integers(1, 4)), draw(st.sampled_from([4, 8, 20, 64, 96]))
    rng = torch.Generator().manual_seed(draw(seeds))
    scale = draw(st.sampled_from([1.0, 0.0, 1e-20, 300.0, 1e20]))
    around = draw(st.sampled_from([0.0, 1.0, -50.0])) * draw(st.sampled_from([1.0, scale]))
    return torch.randn(size, generator=rng) * scale + around


@pytest.mark.parametrize("bits", BITS)
@given(rows())
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
@given(rows())
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
@given(rows(), st.integers(0, 2))
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


def in_integers(
    case: Case, layer: DecodeLayer, bits: tuple[int, int], exact: int = 0
) -> DecodeLayer:
    """A layer of a case with its rows in integers; the rows of the case become what is read."""
    stored = {}
    for name, own in zip(("keys", "values"), bits, strict=True):
        if own:
            slab, dim = getattr(layer, name), case.tensors["query"].shape[2]
            stored |= {name: quantize(slab, own), f"{name.removesuffix('s')}_bits": own}
            given = case.tensors[name]
            for of_case in (name, name.removesuffix("s")):
                rows = case.tensors[of_case]
                if not exact or of_case == name:
                    case.tensors[of_case] = dequantize(quantize(rows, own), dim, own, rows.dtype)
            if exact:
                ring = torch.randn(*slab.shape[:2], exact, dim).to(slab.dtype)
                for slot, head, row, position in near(case, exact + 1):
                    ring[slot, head, position % exact] = given[slot, head, row]
                for slot, head, row, _ in near(case, exact):
                    case.tensors[name][slot, head, row] = given[slot, head, row]
                stored |= {f"exact_{name}": ring}
    return attrs.evolve(layer, **stored)


def near(case: Case, exact: int) -> Iterator[tuple[int, int, int, int]]:
    """Slot, head, row and position of the rows that so many positions up to the query have."""
    positions = case.tensors["positions"]
    for slot, head, row in itertools.product(*map(range, positions.shape)):
        position, query = int(positions[slot, head, row]), int(case.tensors["seq_len"][slot])
        if position >= 0 and position > query - exact:
            yield slot, head, row, position


def put_exact(case: Case, layer: DecodeLayer, exact: int) -> None:
    """Read the near rows of a case from the rings of a layer."""
    for name in ("keys", "values"):
        ring = getattr(layer, f"exact_{name}")
        for slot, head, row, position in () if ring is None else near(case, exact):
            case.tensors[name][slot, head, row] = ring[slot, head, position % exact]


def in_numbers(layer: DecodeLayer, like: Tensor) -> dict[str, Tensor]:
    """The slabs of a layer as numbers."""
    return {
        name: dequantize(slab, like.shape[2], bits, like.dtype) if bits else slab
        for name, slab, bits in (
            ("keys", layer.keys, layer.key_bits),
            ("values", layer.values, layer.value_bits),
        )
    }


def check(case: Case, bits: tuple[int, int], backend: AttentionBackend, exact: int = 0) -> None:
    new = case.new  # as the model gives it
    layer = in_integers(case, case.layer, bits, exact)
    wanted = expected(case)
    output = backend.bind(layer)(**new)
    assert output.dtype == case.dtype
    case.tensors |= in_numbers(layer, new["key"])
    put_exact(case, layer, exact)
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", BACKENDS)
@given(cases(adjacent=True, capacities=SIZES), st.sampled_from(PAIRS))
def test_decode_attends_to_integers_as_loops_do(name, case, bits) -> None:
    check(case, bits, BACKENDS[name](case.dtype))


@pytest.mark.parametrize("name", BACKENDS)
@given(cases(adjacent=True, capacities=SIZES), st.sampled_from(PAIRS), st.integers(1, 40))
def test_decode_reads_the_newest_rows_exactly_as_loops_do(name, case, bits, exact) -> None:
    check(case, bits, BACKENDS[name](case.dtype), exact)


@pytest.mark.parametrize("name", BACKENDS)
@given(cases(slides=True, adjacent=True), st.sampled_from(PAIRS), st.sampled_from([0, 1, 30]))
def test_a_full_window_of_integers_drops_its_oldest_row(name, case, bits, exact) -> None:
    check(case, bits, BACKENDS[name](case.dtype), exact)


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
    case.options["sliding_window"] = 0
    new, ragged = case.new, RaggedCase.of(case, num_free)
    ragged.layer = in_integers(case, ragged.layer, bits, exact)
    wanted = expected(case)
    output = BACKENDS[name](case.dtype).bind(ragged.layer)(**new)
    ragged.layer = attrs.evolve(ragged.layer, **in_numbers(ragged.layer, new["key"]))
    ragged.unpack()
    put_exact(case, ragged.layer, exact)
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])
