"""Storing and attending with torch against loops, and as an operator of torch."""

import pytest
import torch
from decode_cases import (
    TOLERANCE,
    Case,
    assert_as_expected,
    cases,
    expected,
    in_place_arguments,
)
from hypothesis import given
from torch.library import opcheck

from kvpolicy.attention import operator
from kvpolicy.attention.choose import attend_on_cpu
from kvpolicy.attention.operator import DECODE
from kvpolicy.attention.torch_backend.decode import DecodeSlabs, attend_with_torch
from kvpolicy.attention.torch_backend.fixed_shapes import attend_in_fixed_shapes

IMPLEMENTATIONS = {
    "torch": attend_with_torch,
    "cpu": attend_on_cpu,
    "fixed shapes": attend_in_fixed_shapes,
}


def check(name: str, case: Case) -> None:
    wanted = expected(case)
    output = IMPLEMENTATIONS[name](**case.arguments)
    # Logits are rounded to the precision of keys.
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@given(case=cases(adjacent=True))
def test_decode_stores_and_attends_as_loops_do(name, case) -> None:
    check(name, case)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@given(case=cases(slides=True, adjacent=True))
def test_a_full_sliding_window_drops_its_oldest_row(name, case) -> None:
    check(name, case)


@given(case=cases(adjacent=True))
def test_the_operator_is_the_function_of_the_device(case) -> None:
    wanted = expected(case)
    output = DECODE(*in_place_arguments(case))
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])


@given(case=cases(adjacent=True))
def test_the_operator_declares_what_it_changes(case) -> None:
    opcheck(
        DECODE,
        in_place_arguments(case),
        test_utils=("test_schema", "test_faketensor"),
    )


@given(case=cases(adjacent=True))
def test_a_gpu_without_triton_runs_operations_of_torch(case) -> None:
    wanted = expected(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "HAS_TRITON", False)
        output = operator._on_cuda(*in_place_arguments(case))
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])


def test_an_unknown_accumulator_is_named() -> None:
    rows = torch.zeros(1, 1, 1)
    with pytest.raises(ValueError, match=r"accumulators.*attn_mean"):
        DecodeSlabs(rows, rows, rows, accumulated=[rows], accumulators=["attn_mean"])
