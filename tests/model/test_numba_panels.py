"""Products of few rows with packed weights, read where oneDNN keeps them."""

import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model
from torch import Tensor

from kvpolicy import Engine, Plan, Request, packed_model
from kvpolicy.model import recorded
from kvpolicy.model.fused.record import record
from kvpolicy.model.fused.rewrite import call_on_cpu, fuse
from kvpolicy.model.packed import Product
from kvpolicy.model.weight_forms import FORMS, CpuWeights, multiplies_bf16

pytest.importorskip("numba")

from kvpolicy.model.numba_panels import MOST_ROWS, Panels

needs_bf16 = pytest.mark.skipif(not multiplies_bf16(), reason="no instructions for bfloat16")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)]
FORMS_OF_PANELS = ["packed", pytest.param("bf16", marks=needs_bf16)]
MOST = max(MOST_ROWS.values())
# The most by which rounding to bfloat16 changes a number, relative to it.
BF16_ROUNDING = 2.0**-8
# The most by which a sum of products of numbers of size 1 may differ, relative to their number.
ROUNDING = 1e-6


def numbers(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def packed(weights: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weights)
    return found


def panels_of(weights: Tensor) -> Panels:
    panels = Panels.of(packed(weights))
    if panels is None:
        pytest.skip("oneDNN packs such weights otherwise here")
    return panels


def multiply(panels: Panels, states: Tensor) -> Tensor:
    found = torch.empty(len(states), panels.num_outputs)
    panels.multiply(states.data_ptr(), states.stride(0), found)
    return found


def product_by_loops(states: Tensor, weights: Tensor) -> Tensor:
    found = torch.zeros(len(states), len(weights), dtype=torch.float64)
    for t, row in enumerate(states.tolist()):
        for n, own in enumerate(weights.tolist()):
            found[t, n] = math.fsum(one * other for one, other in zip(row, own, strict=True))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(2, 150), st.integers(2, 40), st.integers(0, MOST), st.integers(0, 99))
def test_products_equal_loops(
    dtype: torch.dtype, num_outputs: int, width: int, num_rows: int, seed: int
) -> None:
    weights, states = numbers(seed, num_outputs, width).to(dtype), numbers(seed, num_rows, width)
    panels = panels_of(weights)
    found = multiply(panels, states)
    assert found.shape == (num_rows, num_outputs)
    wanted = product_by_loops(states.to(dtype), weights)
    rtol = 1.01 * BF16_ROUNDING if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(found.double(), wanted, atol=width * ROUNDING, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "width"), [(130, 1100), (64, 513), (3, 1024)])
def test_a_row_has_the_same_sums_to_the_bit_whoever_is_with_it(
    dtype: torch.dtype, num_outputs: int, width: int
) -> None:
    weights, states = numbers(1, num_outputs, width), numbers(2, MOST, width)
    panels = panels_of(weights.to(dtype))
    alone = torch.cat([multiply(panels, row[None]) for row in states])
    wanted = states.to(dtype).double() @ weights.to(dtype).double().T
    rtol = 1.01 * BF16_ROUNDING if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(alone.double(), wanted, atol=width * ROUNDING, rtol=rtol)
    for num_rows in range(1, MOST + 1):
        assert torch.equal(multiply(panels, states[:num_rows]), alone[:num_rows])


def test_numbers_that_are_none_pass_on_to_their_output_alone() -> None:
    weights = numbers(1, 70, 20)
    panels_of(weights)
    weights[2, 3] = torch.nan
    panels = panels_of(weights)  # which lie as those before, which is known by now
    found = multiply(panels, numbers(2, 3, 20))
    assert found.isnan().any(dim=0).tolist() == [n == 2 for n in range(70)]


def test_weights_that_lie_otherwise_are_not_read() -> None:
    weights = numbers(1, 64, 32)
    assert Panels.of(weights.to_mkldnn()) is None
    panels = panels_of(weights)
    assert panels._has(weights)
    assert not panels._has(weights.flip(0))


def test_without_what_torch_tells_of_packed_weights_there_are_no_panels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    panels = panels_of(numbers(1, 64, 32))

    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(torch.ops.mkldnn, "data_ptr", fail)
    assert Panels.of(panels.packed) is None


@pytest.mark.parametrize("form", FORMS_OF_PANELS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("slots", [1, 3])
@torch.inference_mode()
def test_a_bound_product_reads_what_its_rows_hold_by_then(
    slots: int, bias: bool, form: CpuWeights
) -> None:
    layers = [torch.nn.Linear(20, 70, bias=bias), torch.nn.Linear(70, 30, bias=bias)]
    first, second = (Product([layer], FORMS[form]) for layer in layers)
    states = numbers(1, slots, 1, 20)
    for product in (first, second):
        weights = product.plain(0)
        panels_of(weights.bfloat16() if form == "bf16" else weights)

    def run() -> Tensor:
        return second.columns(first.columns(states, 0), 0)

    recording = record(run)
    fuse(recording, joins=False)
    call_on_cpu(recording)
    names = [getattr(node.target, "__name__", "") for node in recording.graph.nodes]
    assert names.count("multiply") == 2
    program, found = recording.program(), []
    for _ in range(3):
        states.normal_()
        found.append(program())
        # Where sums are next to half of the way between two numbers, they may be rounded to either.
        rtol = 2.01 * BF16_ROUNDING if form == "bf16" else 0
        torch.testing.assert_close(found[-1], run(), atol=0.02 * rtol + 1e-5, rtol=rtol)
    assert not torch.equal(found[0], found[1])  # what is answered is not written over


def tokens(model: object, prompts: list[list[int]], slots: int) -> list[list[int]]:
    engine = Engine(model, plan=Plan.full_cache(), slots=slots)  # type: ignore[arg-type]
    run = engine.generate([Request(prompt, 20, stop_ids=()) for prompt in prompts])
    found = [list(one.tokens) for one in run.results()]
    assert run.report.path == "static, recorded"
    return found


@pytest.mark.usefixtures("packs_small_products")
@pytest.mark.parametrize("form", FORMS_OF_PANELS)
def test_a_row_in_a_batch_of_recorded_steps_is_the_row_alone(
    form: CpuWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "STEPS_BEFORE", 3)
    model = packed_model(tiny_model("qwen2"), cpu_weights=form)
    prompts = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6]
    together = tokens(model, prompts, slots=3)
    assert together == [tokens(model, [prompt], slots=1)[0] for prompt in prompts]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.usefixtures("packs_small_products")
def test_a_run_goes_on_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "STEPS_BEFORE", 3)
    engine = Engine(packed_model(tiny_model()), plan=Plan.full_cache(), slots=1)
    run = engine.generate([Request([5, 9, 40], 20, stop_ids=())])
    for _ in range(9):
        run.step()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # those that torch had do not survive
        os.write(write, str(run.results()[0].tokens).encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    assert (status, os.read(read, 1000).decode()) == (0, str(run.results()[0].tokens))
