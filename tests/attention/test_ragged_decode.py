"""Storing and attending where KV heads have segments, against loops over rows of their own."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from decode_cases import TOLERANCE, Case, RaggedCase, assert_as_expected, cases, expected
from hypothesis import given
from hypothesis import strategies as st
from triton_device import DEVICE

from kvpolicy.attention import operator
from kvpolicy.attention.choose import attend_on_cpu
from kvpolicy.attention.torch_backend.decode import attend_with_torch
from kvpolicy.attention.torch_backend.fixed_shapes import attend_in_fixed_shapes

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs the extra kernels")


def even_more(case: Case) -> Case:
    """A case whose heads may have segments: without a sliding window."""
    case.options["sliding_window"] = 0
    return case


def check(case: Case, num_free: int, attend: Callable[..., torch.Tensor], empty: float) -> None:
    wanted = expected(case)
    ragged = RaggedCase.of(case, num_free, empty)
    free = ragged.slabs.positions.clone()
    output = attend(**ragged.arguments)
    ragged.unpack()
    # Logits are rounded to the precision of keys in torch.
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])
    # One place of each segment has changed, and nothing else.
    changed = (ragged.slabs.positions != free).sum()
    assert changed == case.tensors["live"].sum() * case.tensors["rows"].shape[1]


CASES = cases(slides=False, adjacent=True).map(even_more)


@given(CASES, st.integers(1, 4))
def test_torch_attends_to_segments_as_loops_do(case, num_free) -> None:
    check(case, num_free, attend_with_torch, 0.0)


@given(CASES, st.integers(1, 4))
def test_a_cpu_attends_to_segments_as_loops_do(case, num_free) -> None:
    check(case, num_free, attend_on_cpu, 0.0)


@given(CASES, st.integers(1, 4))
def test_fixed_shapes_attend_to_segments_as_loops_do(case, num_free) -> None:
    check(case, num_free, attend_in_fixed_shapes, 0.0)


@needs_triton
@given(cases(slides=False, empty=float("nan"), device=DEVICE).map(even_more), st.integers(1, 4))
def test_triton_attends_to_segments_as_loops_do(case, num_free) -> None:
    from kvpolicy.attention.triton_backend.decode import decode

    check(case, num_free, decode, float("nan"))


@given(CASES)
def test_the_operator_passes_segments_on(case) -> None:
    wanted = expected(case)
    ragged = RaggedCase.of(case, 2)
    output = torch.ops.kvpolicy.decode(*ragged.operator_arguments)
    ragged.unpack()
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])
    assert operator.DECODE is torch.ops.kvpolicy.decode.default
