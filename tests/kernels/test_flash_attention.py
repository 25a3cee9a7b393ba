"""Attention by flash-attn, or a stand-in for it, behind the operator that runs Triton's kernels."""

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from decode_cases import assert_as_expected, cases, expected, in_place_arguments
from flash_stand_in import FlashStandIn
from hypothesis import given
from tiny import tiny_model
from triton_device import DEVICE, INTERPRETED

from kvpolicy import Engine, Plan
from kvpolicy.cache import static_step
from kvpolicy.engine import batch, core
from kvpolicy.kernels import flash_attention, operator, triton_decode
from kvpolicy.kernels.decode import Counts, DecodeSlabs
from kvpolicy.kernels.flash_attention import attend_with_flash, can_attend

# A number in rows that are not held which would change any output. Slabs never hold NaN there.
EMPTY = 1e4


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FlashStandIn:
    stand_in = FlashStandIn()
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    return stand_in


@given(cases(slides=False, empty=EMPTY, outputs_only=True, device=DEVICE))
def test_flash_attn_attends_where_outputs_are_all_that_is_wanted(case) -> None:
    wanted, stand_in = expected(case), FlashStandIn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", stand_in)
        output = operator._on_cuda(*in_place_arguments(case, flash=True))
    assert stand_in.num_calls == 1
    assert_as_expected(case, output, wanted)


@given(cases(slides=False, empty=EMPTY, outputs_only=True, device=DEVICE))
def test_the_package_attends_as_loops_do(case) -> None:
    if DEVICE.type != "cuda" or find_spec("flash_attn") is None:
        pytest.skip("needs a GPU and flash-attn")
    wanted = expected(case)
    output = operator._on_cuda(*in_place_arguments(case, flash=True))
    assert_as_expected(case, output, wanted)


@given(cases(empty=EMPTY, device=DEVICE))
def test_all_else_is_attended_to_by_our_kernel(case) -> None:
    wanted, stand_in = expected(case), FlashStandIn()
    wants_more = case.accumulated or case.tensors["sinks"] is not None
    other = case.dtype == torch.float32 or case.tensors["keys"].shape[3] % 8
    if not (wants_more or other or case.options["sliding_window"]):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", stand_in)
        output = operator._on_cuda(*in_place_arguments(case, flash=True))
    assert stand_in.num_calls == 0
    assert_as_expected(case, output, wanted)


@given(cases(slides=False, empty=EMPTY, outputs_only=True, device=DEVICE))
def test_nothing_is_attended_to_by_flash_attn_unless_it_is_asked_for(case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", None)  # importing it raises
        operator._on_cuda(*in_place_arguments(case))


def slabs(dim: int = 64, dtype: torch.dtype = torch.bfloat16, **named: object) -> DecodeSlabs:
    rows = torch.zeros(1, 1, 4, dim, dtype=dtype)
    return DecodeSlabs(rows, rows, torch.zeros(1, 1, 4, dtype=torch.int64), **named)


def test_flash_attn_can_attend_to_plain_layers_only() -> None:
    assert can_attend(slabs(), None, 0)
    assert can_attend(slabs(dim=256, dtype=torch.float16, window=torch.zeros(1)), None, 0)
    assert not can_attend(
        slabs(accumulated=[torch.zeros(1, 1, 4)], accumulators=["attn_sums"]), None, 0
    )
    assert not can_attend(slabs(), torch.zeros(1), 0)
    assert not can_attend(slabs(), None, 4)
    assert not can_attend(slabs(dtype=torch.float32), None, 0)
    assert not can_attend(slabs(dim=20), None, 0)
    assert not can_attend(slabs(dim=264), None, 0)


def test_no_more_rows_are_attended_to_than_a_slab_has(flash: FlashStandIn) -> None:
    """A slot that takes no part may be full, or empty."""
    counts = Counts(torch.tensor([[4], [0]]), torch.tensor([9, 0]), torch.tensor([False, False]))
    rows = torch.ones(2, 1, 4, 8, dtype=torch.float16)
    layer = DecodeSlabs(rows, rows, torch.zeros(2, 1, 4, dtype=torch.int64))
    output = attend_with_flash(rows[:, :, 0], layer, counts, scaling=1.0, softcap=0.0)
    assert (output == 1).all()


def in_graph(*arguments: Any, **options: Any) -> static_step.StaticStep:
    return static_step.StaticStep(*arguments, **options | {"in_graph": True})


@pytest.mark.skipif(not INTERPRETED, reason="needs kernels that run on the CPU")
def test_an_engine_attends_with_flash_attn_in_the_layers_that_it_can_run(
    flash: FlashStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a GPU on the CPU, in fp32, so that rounding changes no token."""
    flash.dtypes = (torch.float32,)
    monkeypatch.setattr(flash_attention, "PRECISIONS", flash.dtypes)
    monkeypatch.setattr(static_step, "decode", triton_decode.decode)
    monkeypatch.setattr(core, "flash_problem", lambda *_: None)
    monkeypatch.setattr(batch, "StaticStep", in_graph)
    model = tiny_model()
    plan = Plan.from_dict(
        {
            "budget": 12,
            "buffer": 4,
            "layers": [{"where": "0:1", "stack": ["h2o"]}, {"where": "1:", "stack": ["snapkv"]}],
        }
    )
    tokens = []
    for gpu_attention in ("triton", "flash-attn"):
        run = Engine(model, plan=plan, gpu_attention=gpu_attention).generate(
            [[5, 9, 40, 2, 2, 7, 11], [1, 2]], max_new_tokens=24, stop_ids=()
        )
        tokens.append([result.tokens for result in run.results()])
        if gpu_attention == "triton":
            assert flash.num_calls == 0
            assert run.report.path == "static"
    assert run.report.path == "static, flash-attn in 1 of 2 layers"
    assert run.report.compactions > 0
    assert flash.num_calls == 23
    assert tokens[0] == tokens[1]
