"""Rows in integers: rows to store, and cases of decoding over them beside loops over numbers."""

import itertools
from collections.abc import Iterator

import attrs
import torch
from decode_cases import TOLERANCE, Case, RaggedCase, assert_as_expected, expected
from hypothesis import strategies as st
from strategies import seeds
from torch import Tensor

from kvpolicy.attention.base import AttentionBackend, DecodeLayer
from kvpolicy.attention.integers import dequantize, quantize

BITS = (8, 4)
# Bits of keys and of values; 0: numbers as they are.
PAIRS = [(8, 8), (8, 4), (4, 4), (0, 8), (4, 0)]


@st.composite
def number_rows(draw: st.DrawFn) -> Tensor:
    """Rows of some size and scale, around some number."""
    size = draw(st.integers(1, 4)), draw(st.sampled_from([4, 8, 20, 64, 96]))
    rng = torch.Generator().manual_seed(draw(seeds))
    scale = draw(st.sampled_from([1.0, 0.0, 1e-20, 300.0, 1e20]))
    around = draw(st.sampled_from([0.0, 1.0, -50.0])) * draw(st.sampled_from([1.0, scale]))
    return torch.randn(size, generator=rng) * scale + around


def in_integers(
    case: Case, layer: DecodeLayer, bits: tuple[int, int], exact: int = 0
) -> DecodeLayer:
    """A layer of a case with its rows in integers; the rows of the case become what is read."""
    stored = {}
    for name, own in zip(("keys", "values"), bits, strict=True):
        if own:
            slab = getattr(layer, name)
            dim = slab.shape[3]
            stored |= {name: quantize(slab, own), f"{name.removesuffix('s')}_bits": own}
            given = case.tensors[name]
            for of_case in (name, name.removesuffix("s")):
                rows = case.tensors[of_case]
                if not exact or of_case == name:
                    case.tensors[of_case] = dequantize(quantize(rows, own), dim, own, rows.dtype)
            if exact:
                ring = torch.randn(*slab.shape[:2], exact, dim).to(slab)
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


def in_numbers(layer: DecodeLayer, new: dict[str, object]) -> dict[str, Tensor]:
    """The slabs of a layer as numbers, like the new rows."""
    dtype = new["key"].dtype
    return {
        name: dequantize(slab, new[name.removesuffix("s")].shape[2], bits, dtype) if bits else slab
        for name, slab, bits in (
            ("keys", layer.keys, layer.key_bits),
            ("values", layer.values, layer.value_bits),
        )
    }


def check_integers(
    case: Case, bits: tuple[int, int], backend: AttentionBackend, exact: int = 0
) -> None:
    """Decode over the rows of a case in integers, beside what loops make of their numbers."""
    new = case.new  # as the model gives it
    layer = in_integers(case, case.layer, bits, exact)
    wanted = expected(case)
    output = backend.bind(layer)(**new)
    assert output.dtype == case.dtype
    case.tensors |= in_numbers(layer, new)
    put_exact(case, layer, exact)
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])


def check_integers_in_segments(
    case: Case,
    num_free: int,
    bits: tuple[int, int],
    backend: AttentionBackend,
    exact: int,
    empty: float = 0.0,
) -> None:
    """The same where KV heads have segments, of a case without a sliding window."""
    case.options["sliding_window"] = 0
    new, ragged = case.new, RaggedCase.of(case, num_free, empty)
    ragged.layer = in_integers(case, ragged.layer, bits, exact)
    wanted = expected(case)
    output = backend.bind(ragged.layer)(**new)
    ragged.layer = attrs.evolve(ragged.layer, **in_numbers(ragged.layer, new))
    ragged.unpack()
    put_exact(case, ragged.layer, exact)
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])
