"""Storing and attending with torch against loops, and as an operator of torch."""

import pytest
import torch
from decode_cases import (
    TOLERANCE,
    Case,
    assert_as_expected,
    cases,
    expected,
    operator_arguments,
)
from hypothesis import given
from torch.library import opcheck

from kvpolicy.attention import choose
from kvpolicy.attention.base import DecodeLayer
from kvpolicy.attention.choose import backend_for
from kvpolicy.attention.operator import DECODE
from kvpolicy.attention.torch_backend.backend import FixedShapesBackend, TorchBackend

CPU = torch.device("cpu")
BACKENDS = {
    "torch": lambda _: TorchBackend(),
    "cpu": lambda dtype: backend_for(CPU, dtype),
    "fixed shapes": lambda _: FixedShapesBackend(),
    "in a graph": lambda dtype: backend_for(CPU, dtype, in_graph=True),
}


def check(name: str, case: Case) -> None:
    wanted = expected(case)
    output = BACKENDS[name](case.dtype).bind(case.layer)(**case.new)
    # Logits are rounded to the precision of keys.
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", BACKENDS)
@given(case=cases(adjacent=True, one_size=False))
def test_decode_stores_and_attends_as_loops_do(name, case) -> None:
    check(name, case)


@pytest.mark.parametrize("name", BACKENDS)
@given(case=cases(slides=True, adjacent=True, one_size=False))
def test_a_full_sliding_window_drops_its_oldest_row(name, case) -> None:
    check(name, case)


@given(case=cases(adjacent=True, one_size=False))
def test_the_operator_is_the_function_of_the_device(case) -> None:
    wanted = expected(case)
    output = DECODE(*operator_arguments(case.layer, case.new))
    assert_as_expected(case, output, wanted, sums_tolerance=TOLERANCE[case.dtype])


@given(case=cases(adjacent=True, one_size=False))
def test_the_operator_declares_what_it_changes(case) -> None:
    opcheck(
        DECODE,
        operator_arguments(case.layer, case.new),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gpu_without_triton_reads_nothing_on_the_host(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "HAS_TRITON", False)
    assert isinstance(backend_for(torch.device("cuda"), dtype), FixedShapesBackend)


def test_an_unknown_accumulator_is_named() -> None:
    rows = torch.zeros(1, 1, 1)
    with pytest.raises(ValueError, match=r"accumulators.*attn_mean"):
        DecodeLayer(*[rows] * 6, accumulated=[rows], accumulators=["attn_mean"])
