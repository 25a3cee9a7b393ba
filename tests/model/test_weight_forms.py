"""Weights in a form for CPUs: what rounding does to numbers, and products of what is left."""

import math
import os
import re
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import greedy_tokens, tiny_model
from torch import Tensor, nn

from kvpolicy import Engine, Plan, packed_model
from kvpolicy.errors import ModelError
from kvpolicy.model import weight_forms
from kvpolicy.model.fingerprint import model_fingerprint
from kvpolicy.model.packed import PackedLinear, packed_weights
from kvpolicy.model.weight_forms import FEW_ROWS, FORMS, CpuWeights, multiplies_bf16

pytestmark = pytest.mark.usefixtures("packs_small_products")

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="needs the extra cpu")
needs_bf16 = pytest.mark.skipif(not multiplies_bf16(), reason="no instructions for bfloat16")
ROUNDED: list[Any] = [
    pytest.param("bf16", marks=needs_bf16),
    pytest.param("int8", marks=needs_numba),
]

# The most by which rounding to bfloat16 changes a number, relative to it.
BF16_ROUNDING = 2.0**-8
# The most by which a sum of products of numbers of size 1 may differ, relative to their number.
SUM_ROUNDING = 1e-6

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 4]


def numbers(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def rounded_by_loops(weights: Tensor) -> np.ndarray:
    """Weights in 8 bits: one number after the other, in double precision."""
    found = np.zeros(weights.shape)
    for n, row in enumerate(weights.tolist()):
        scale = max(abs(weight) for weight in row) / 127
        for k, weight in enumerate(row):
            found[n, k] = 0 if scale == 0 else scale * round(weight / scale)
    return found


def product_by_loops(states: Tensor, weights: np.ndarray) -> np.ndarray:
    found = np.zeros((len(states), len(weights)))
    for t, row in enumerate(states.tolist()):
        for n in range(len(weights)):
            found[t, n] = math.fsum(state * weights[n, k] for k, state in enumerate(row))
    return found


@needs_numba
@given(st.integers(1, 37), st.integers(1, 70), st.integers(0, FEW_ROWS), st.integers(0, 99))
def test_products_with_integers_equal_loops_that_round_and_multiply(
    num_outputs: int, width: int, num_rows: int, seed: int
) -> None:
    weights, states = numbers(seed, num_outputs, width), numbers(seed + 1, num_rows, width)
    weights[0] = 0
    held = FORMS["int8"](weights)
    wanted = rounded_by_loops(weights)
    np.testing.assert_allclose(held.plain().double(), wanted, atol=1e-6)
    found = held.multiply(states, None)
    wanted = product_by_loops(states, wanted)
    np.testing.assert_allclose(found.double(), wanted, atol=width * SUM_ROUNDING)


@needs_bf16
@given(st.integers(1, 37), st.integers(1, 70), st.integers(0, 12), st.integers(0, 99))
def test_products_in_bf16_equal_loops_over_rounded_numbers(
    num_outputs: int, width: int, num_rows: int, seed: int
) -> None:
    weights, states = numbers(seed, num_outputs, width), numbers(seed + 1, num_rows, width)
    held = FORMS["bf16"](weights)
    assert torch.equal(held.plain(), weights.bfloat16().float())
    found = held.multiply(states, None)
    wanted = product_by_loops(states.bfloat16(), weights.bfloat16().double().numpy())
    atol = width * SUM_ROUNDING
    np.testing.assert_allclose(found.double(), wanted, atol=atol, rtol=1.01 * BF16_ROUNDING)


@needs_numba
@pytest.mark.parametrize("in_bf16", [pytest.param(True, marks=needs_bf16), False])
def test_many_rows_are_multiplied_with_the_same_integers(
    in_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_forms, "multiplies_bf16", lambda: in_bf16)
    monkeypatch.setattr(weight_forms, "_BLOCK", 7)
    weights, states = numbers(1, 30, 40), numbers(2, FEW_ROWS + 3, 40)
    held = FORMS["int8"](weights)
    found = held.multiply(states, None)
    given_states = states.bfloat16().double() if in_bf16 else states.double()
    wanted = given_states @ torch.tensor(rounded_by_loops(weights)).T
    rtol = 1.01 * BF16_ROUNDING if in_bf16 else 0
    torch.testing.assert_close(found.double(), wanted, atol=40 * SUM_ROUNDING, rtol=rtol)


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("num_rows", [2, FEW_ROWS, FEW_ROWS + 1, 40])
def test_a_row_among_others_equals_the_row_alone_up_to_the_stated_rounding(
    form: CpuWeights, num_rows: int
) -> None:
    width = 64
    held, states = FORMS[form](numbers(1, 48, width)), numbers(2, num_rows, width)
    together = held.multiply(states, None)
    alone = torch.cat([held.multiply(row[None], None) for row in states])
    tolerance = {"atol": width * SUM_ROUNDING, "rtol": 0.0}
    if form == "bf16":  # sums of nearly equal size may be rounded to neighbours
        tolerance["rtol"] = 2.01 * BF16_ROUNDING
    elif num_rows > FEW_ROWS:  # whose inputs and results are rounded
        size = float(held.plain().norm(dim=1).max() * states.norm(dim=1).max())
        tolerance["atol"] += 2 * BF16_ROUNDING * size
    torch.testing.assert_close(together, alone, **tolerance)


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_have_the_shape_and_precision_of_plain_ones(
    form: CpuWeights, dtype: torch.dtype
) -> None:
    model = tiny_model("qwen2", dtype=dtype)  # whose projections have biases
    packed = packed_model(model, cpu_weights=form)
    layers = [one for one in packed.modules() if isinstance(one, PackedLinear)]
    assert len(layers) == packed_weights(packed).num_layers == 15
    with torch.inference_mode():
        for layer in layers:
            for shape in ((3, 2), (1,), (), (2, 0), (4, 5)):
                states = numbers(3, *shape, layer.in_features).to(dtype)
                found = layer(states)
                wanted = nn.functional.linear(states.double(), layer.weight.double())
                wanted = wanted if layer.bias is None else wanted + layer.bias.double()
                assert (found.shape, found.dtype) == (wanted.shape, dtype)
                assert (found - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("form", ROUNDED)
def test_an_engine_has_the_tokens_of_generate_with_few_rows(form: CpuWeights) -> None:
    packed = packed_model(tiny_model(num_layers=3), cpu_weights=form)
    plan = Plan.full_cache()
    for chunk, slots in ((FEW_ROWS, 1), (3, 1), (2, 3)):
        engine = Engine(packed, plan=plan, chunk=chunk, slots=slots)
        found = [list(one.tokens) for one in engine.generate(PROMPTS, max_new_tokens=10).results()]
        assert found == [greedy_tokens(packed, prompt, 10) for prompt in PROMPTS]


@pytest.mark.parametrize("form", ROUNDED)
def test_a_saved_model_has_the_numbers_that_were_multiplied(form: CpuWeights) -> None:
    model = tiny_model("llama")
    kept = packed_model(model, cpu_weights=form).state_dict()
    released = packed_model(tiny_model("llama"), cpu_weights=form, release=True)
    found = packed_weights(released)
    assert found.form == form
    assert found.packed_bytes < 0.7 * found.released_bytes  # oneDNN pads
    again = tiny_model("llama")
    again.load_state_dict(released.state_dict())
    name = "model.layers.0.mlp.down_proj.weight"
    weight = model.state_dict()[name]
    for state in (kept, released.state_dict(), packed_model(again, cpu_weights=form).state_dict()):
        assert not torch.equal(state[name], weight)
        torch.testing.assert_close(state[name], kept[name], atol=1e-7, rtol=0)
        torch.testing.assert_close(state[name], weight, atol=0.01, rtol=BF16_ROUNDING)


@pytest.mark.parametrize("form", ROUNDED)
def test_another_form_is_another_model(form: CpuWeights) -> None:
    model = tiny_model()
    forms: list[CpuWeights] = ["packed", form]
    packed = [packed_model(model, cpu_weights=one) for one in forms]
    assert len({model_fingerprint(one) for one in packed}) == 2
    assert packed_model(packed[1], cpu_weights=form) is packed[1]
    assert packed_model(model, cpu_weights="plain") is model
    with pytest.raises(ModelError, match=r"another form already; give the model"):
        Engine(packed[0], plan=Plan.full_cache(), cpu_weights=form)


@needs_numba
def test_numbers_that_are_none_pass_on_to_their_output_alone() -> None:
    for number in (torch.nan, torch.inf):
        weights = numbers(1, 6, 20)
        weights[2, 3] = number
        for num_rows in (1, 5, FEW_ROWS + 4):
            found = FORMS["int8"](weights).multiply(numbers(2, num_rows, 20), None)
            assert found.isnan().any(dim=0).tolist() == [n == 2 for n in range(6)]


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_integers_are_multiplied_in_a_forked_process() -> None:
    held, states = FORMS["int8"](torch.ones(4, 8)), torch.ones(2, 8)
    wanted = held.multiply(states, None).tolist()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # those that torch had do not survive
        os.write(write, str(held.multiply(states, None).tolist()).encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    assert (status, os.read(read, 1000).decode()) == (0, str(wanted))


def without_bf16(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(weight_forms, "multiplies_bf16", lambda: False)
    return tiny_model()


def without_numba(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(weight_forms, "HAS_NUMBA", False)
    return tiny_model()


REFUSED: list[tuple[CpuWeights, Any, str]] = [
    ("bf16", without_bf16, "no instructions that multiply bfloat16, .*choose 'packed'"),
    ("int8", without_numba, r"in Numba, which pip install .*\[cpu\]"),
    ("int8", lambda _: tiny_model(dtype=torch.float64), "float64 is not rounded; .*float32"),
    ("bf16", lambda _: tiny_model(dtype=torch.float64), "float64 is not rounded; .*float32"),
    ("int8", lambda _: tiny_model().to("meta"), "on the device 'meta'"),
]


@pytest.mark.parametrize(("form", "make", "problem"), REFUSED)
def test_what_cannot_be_rounded_here_is_refused_before_anything_is_released(
    form: CpuWeights, make: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(monkeypatch)
    with pytest.raises(ModelError) as error:
        packed_model(model, cpu_weights=form, release=True)
    assert re.search(rf"^the weights of model \w+ cannot be packed: .*{problem}", str(error.value))
    assert not any(one.isnan().any() for one in model.parameters() if not one.is_meta)
