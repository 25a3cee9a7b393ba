"""Storing and attending where KV heads have segments, against loops over rows of their own."""

from importlib.util import find_spec

import pytest
import torch
from decode_cases import TOLERANCE, Case, RaggedCase, assert_as_expected, cases, expected
from hypothesis import given
from hypothesis import strategies as st
from triton_device import DEVICE

from kvpolicy.attention.base import AttentionBackend
from kvpolicy.attention.choose import backend_for
from kvpolicy.attention.torch_backend.backend import FixedShapesBackend, TorchBackend

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the extra kernels")


def even_more(case: Case) -> Case:
    """A case whose heads may have segments: without a sliding window."""
    case.options["sliding_window"] = 0
    return case


def check(case: Case, num_free: int, backend: AttentionBackend, empty: float) -> None:
    wanted = expected(case)
    ragged = RaggedCase.of(case, num_free, empty)
    free = ragged.layer.positions.clone()
    output = backend.bind(ragged.layer)(**case.new)
    ragged.unpack()
    # Logits are rounded to the precision of keys in torch.
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])
    # One place of each segment has changed, and nothing else.
    changed = (ragged.layer.positions != free).sum()
    assert changed == case.tensors["live"].sum() * case.tensors["rows"].shape[1]


CASES = cases(slides=False, adjacent=True, one_size=False).map(even_more)


@given(CASES, st.integers(1, 4))
def test_torch_attends_to_segments_as_loops_do(case, num_free) -> None:
    check(case, num_free, TorchBackend(), 0.0)


@given(CASES, st.integers(1, 4))
def test_a_cpu_attends_to_segments_as_loops_do(case, num_free) -> None:
    check(case, num_free, backend_for(CPU, case.dtype), 0.0)


@given(CASES, st.integers(1, 4))
def test_fixed_shapes_attend_to_segments_as_loops_do(case, num_free) -> None:
    check(case, num_free, FixedShapesBackend(), 0.0)


@needs_triton
@given(cases(slides=False, empty=float("nan"), device=DEVICE).map(even_more), st.integers(1, 4))
def test_triton_attends_to_segments_as_loops_do(case, num_free) -> None:
    from kvpolicy.attention.triton_backend.backend import TritonBackend

    check(case, num_free, TritonBackend(), float("nan"))


@given(CASES)
def test_the_operator_passes_segments_on(case) -> None:
    check(case, 2, backend_for(CPU, case.dtype, in_graph=True), 0.0)
