"""Storing and attending in Triton against loops."""

import attrs
import pytest
import torch
from decode_cases import (
    SUMS_TOLERANCE,
    TOLERANCE,
    assert_as_expected,
    cases,
    expected,
)
from hypothesis import given
from hypothesis import strategies as st
from integer_cases import BITS, PAIRS, check_integers, check_integers_in_segments, number_rows
from torch import Tensor
from triton_device import DEVICE

from kvpolicy.attention import choose
from kvpolicy.attention.base import DecodeLayer
from kvpolicy.attention.choose import backend_for
from kvpolicy.attention.chunks import chunks_of
from kvpolicy.attention.integers import bytes_of_row, dequantize, quantize
from kvpolicy.attention.triton_backend import backend
from kvpolicy.attention.triton_backend.append import append
from kvpolicy.attention.triton_backend.backend import TritonBackend
from kvpolicy.attention.triton_backend.decode import attend

# Rows that are not held are not even read.
CASES = cases(empty=float("nan"), device=DEVICE, one_size=False)


@given(CASES)
def test_decode_stores_and_attends_as_loops_do(case) -> None:
    wanted = expected(case)
    output = TritonBackend().bind(case.layer)(**case.new)
    assert_as_expected(case, output, wanted)


@given(cases(slides=True, empty=float("nan"), device=DEVICE))
def test_a_full_sliding_window_drops_its_oldest_row(case) -> None:
    wanted = expected(case)
    output = TritonBackend().bind(case.layer)(**case.new)
    assert_as_expected(case, output, wanted)


@given(CASES, st.sampled_from(PAIRS), st.sampled_from([0, 1, 30]))
def test_decode_attends_to_integers_as_loops_do(case, bits, exact) -> None:
    check_integers(case, bits, TritonBackend(), exact)


@given(
    cases(slides=True, empty=float("nan"), device=DEVICE),
    st.sampled_from(PAIRS),
    st.sampled_from([0, 1, 30]),
)
def test_a_full_window_of_integers_drops_its_oldest_row(case, bits, exact) -> None:
    check_integers(case, bits, TritonBackend(), exact)


@given(
    cases(slides=False, empty=float("nan"), device=DEVICE),
    st.integers(1, 4),
    st.sampled_from(PAIRS),
    st.sampled_from([0, 1, 30]),
)
def test_decode_attends_to_integers_in_segments_as_loops_do(case, num_free, bits, exact) -> None:
    check_integers_in_segments(case, num_free, bits, TritonBackend(), exact, empty=float("nan"))


def stored_rows(given: Tensor, bits: int) -> Tensor:
    """The bytes that are stored of new rows, one of each slot."""
    num, size = len(given), bytes_of_row(given.shape[1], bits)
    slab = torch.zeros(num, 1, 3, size, dtype=torch.uint8, device=DEVICE)
    positions = torch.full((num, 1, 3), -1, device=DEVICE)
    rows, seq_len = torch.ones(num, 1, device=DEVICE).long(), torch.full((num,), 5, device=DEVICE)
    live = torch.ones(num, dtype=torch.bool, device=DEVICE)
    layer = DecodeLayer(
        slab, slab.clone(), positions, rows, seq_len, live, key_bits=bits, value_bits=bits
    )
    new = given[:, None]
    append(layer, new, new, new)
    assert torch.equal(layer.keys, layer.values)
    assert not layer.keys[:, 0, ::2].any()
    return layer.keys[:, 0, 1]


@pytest.mark.parametrize("bits", BITS)
@given(number_rows())
def test_the_bytes_of_new_rows_are_those_of_torch(bits: int, given: Tensor) -> None:
    given = given.to(DEVICE)
    assert torch.equal(stored_rows(given, bits), quantize(given, bits))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_made_finite(bits: int, number: float) -> None:
    given = torch.ones(2, 64, device=DEVICE)
    given[1, 40] = number
    found = dequantize(stored_rows(given, bits), 64, bits, torch.float32)
    assert torch.equal(found[0], given[0])
    assert not found[1, 32:].isfinite().any()


@pytest.mark.parametrize(("dim", "value_dim"), [(288, 256), (64, 512)])
def test_heads_too_large_for_a_multiprocessor_are_attended_to_in_torch(
    dim: int, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slab(size: int) -> Tensor:
        return torch.zeros(1, 1, 3, size, device=DEVICE)

    positions = torch.zeros(1, 1, 3, dtype=torch.int64, device=DEVICE)
    rows, seq_len = torch.zeros_like(positions[:, :, 0]), torch.zeros_like(positions[:, 0, 0])
    live = torch.ones(1, dtype=torch.bool, device=DEVICE)
    layer = DecodeLayer(slab(dim), slab(value_dim), positions, rows, seq_len, live)
    monkeypatch.setattr(backend, "store_and_attend", None)
    query, value = (torch.ones(1, 1, size, device=DEVICE) for size in (dim, value_dim))
    assert torch.equal(TritonBackend().bind(layer)(query, query, value, scaling=1.0), value)


def test_a_gpu_with_triton_runs_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "HAS_TRITON", True)
    assert isinstance(backend_for(torch.device("cuda"), torch.float16), TritonBackend)


@given(CASES, st.integers(1, 3))
def test_output_does_not_depend_on_the_number_of_chunks(case, chunks) -> None:
    TritonBackend().bind(case.layer)(**case.new)
    new = {name: one for name, one in case.new.items() if name not in ("key", "value")}
    value_dim, outputs, sums = case.tensors["value"].shape[2], [], []
    for count in (1, chunks):
        received = torch.zeros_like(case.tensors["positions"], dtype=torch.float32)
        layer = attrs.evolve(case.layer, accumulated=[received], accumulators=["attn_sums"])
        outputs.append(attend(layer, **new, value_dim=value_dim, chunks=count))
        sums.append(received)
    torch.testing.assert_close(*outputs, rtol=0, atol=TOLERANCE[case.dtype])
    torch.testing.assert_close(*sums, rtol=0, atol=SUMS_TOLERANCE)


def test_a_slab_without_room_leaves_its_neighbours_alone() -> None:
    slabs = torch.zeros(2, 1, 2, 3, 4, device=DEVICE)  # keys and values of 2 slots with 3 rows
    positions = torch.zeros(2, 1, 3, dtype=torch.int64, device=DEVICE)
    new = torch.ones(2, 1, 4, device=DEVICE)
    rows = torch.full((2, 1), 3, device=DEVICE)
    seq_len, live = torch.full((2,), 9, device=DEVICE), torch.ones(2, dtype=torch.bool).to(DEVICE)
    layer = DecodeLayer(slabs[:, :, 0], slabs[:, :, 1], positions, rows, seq_len, live)
    append(layer, new, new, new)
    assert not slabs.any()
    assert not positions.any()


@given(st.integers(1, 20_000), st.integers(1, 5_000), st.integers(1, 200))
def test_chunks_cover_a_slab_and_none_is_empty(capacity, programs, processors) -> None:
    count, length = chunks_of(capacity, programs, processors)
    assert (count - 1) * length < capacity <= count * length
    assert length % 64 == 0
    assert count == 1 or length <= 2048 or count * programs <= 2 * processors


@pytest.mark.parametrize(
    ("capacity", "sequences", "chunks"),
    [(1152, 1, 9), (1152, 16, 2), (1152, 32, 1), (1152, 256, 1), (8704, 1, 28), (8704, 256, 5)],
)
def test_there_are_as_many_chunks_as_a_gpu_has_work_for(
    capacity: int, sequences: int, chunks: int
) -> None:
    """On 132 processors, with 8 KV heads."""
    assert chunks_of(capacity, 8 * sequences, 132)[0] == chunks
