"""Fused operators in Triton are as near to exact numbers as the operators that they replace."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from families import family_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from triton_device import DEVICE

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import Slab
from kvpolicy.model import fused_prompts
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.forward_input import ForwardInput
from kvpolicy.model.fused import operators, triton_kernels
from kvpolicy.model.fused.record import record
from kvpolicy.model.fused.rewrite import fuse

EPS = 1e-5
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
HEAD_SIZES = st.sampled_from([2, 6, 16, 80])
# The part of the exact result by which both may differ from it by the order of sums alone.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers within a larger tensor, as columns of a joint product are."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(*shape[:-1], shape[-1] + 3, generator=generator)
    return numbers.to(DEVICE, dtype)[..., 2:-1]


def exact_norm(states: Tensor, weight: Tensor) -> Tensor:
    rows = []
    for row in states.double().reshape(-1, states.shape[-1]):
        mean = sum(number * number for number in row.tolist()) / len(row)
        rows.append(row / (mean + EPS) ** 0.5 * weight.double())
    return torch.stack(rows).reshape(states.shape)


def exact_rotation(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Numbers i and i + D / 2 are a point, which is turned."""
    half = states.shape[-1] // 2
    cos, sin, turned = cos.double(), sin.double(), states.double().clone()
    for i in range(half):
        x, y = states[..., i].double(), states[..., half + i].double()
        turned[..., i] = x * cos[..., i] - y * sin[..., i]
        turned[..., half + i] = y * cos[..., half + i] + x * sin[..., half + i]
    return turned


def assert_as_near(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    assert found.dtype == plain.dtype
    assert found.shape == plain.shape
    allowed = (plain.double() - exact).norm() + ROUNDING[found.dtype] * exact.norm()
    assert (found.double() - exact).norm() <= allowed


def plain_norm(weight: Tensor) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(len(weight), EPS)
    norm.weight = torch.nn.Parameter(weight)
    return norm.requires_grad_(requires_grad=False)


@given(st.integers(1, 3), st.sampled_from([1, 5, 64, 600]), DTYPES, st.integers(0, 99))
def test_norms(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    states, added = (drawn((rows, 1, size), dtype, seed + i) for i in range(2))
    weight = drawn((size,), dtype, seed + 2).contiguous()
    plain = plain_norm(weight)
    exact = exact_norm(states, weight)
    assert_as_near(triton_kernels.norm(states, weight, EPS), plain(states), exact)
    total, normed = triton_kernels.add_norm(states, added, weight, EPS)
    torch.testing.assert_close(total, states + added, rtol=0, atol=0)
    assert_as_near(normed, plain(total), exact_norm(total, weight))


@given(st.integers(1, 3), st.integers(1, 3), HEAD_SIZES, DTYPES, st.booleans(), st.integers(0, 99))
def test_rotations(
    slots: int, length: int, dim: int, dtype: torch.dtype, normed: bool, seed: int
) -> None:
    """Of a step, and of the tokens of a prompt."""
    query, key = (
        drawn((slots, length, heads, dim), dtype, seed + heads).transpose(1, 2) for heads in (4, 2)
    )
    angles = 9 * drawn((slots, length, dim), torch.float32, seed)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = (
        [drawn((dim,), dtype, seed + i).contiguous() for i in range(2)] if normed else [None] * 2
    )
    found = triton_kernels.rotate(query, key, cos[:, None], sin[:, None], *weights, EPS)
    exact, before = [], []
    for states, weight in zip((query, key), weights, strict=True):
        wide = states.double() if weight is None else exact_norm(states, weight)
        exact.append(exact_rotation(wide, cos[:, None], sin[:, None]))
        before.append(states if weight is None else plain_norm(weight)(states))
    plain = apply_rotary_pos_emb(*before, cos, sin)
    for ours, theirs, wanted in zip(found, plain, exact, strict=True):
        assert_as_near(ours, theirs, wanted)


@given(st.integers(1, 3), st.sampled_from([1, 70, 1030]), DTYPES, st.integers(0, 99))
def test_gates(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    gate, up = (5 * drawn((rows, 1, size), dtype, seed + i) for i in range(2))
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    assert_as_near(triton_kernels.gate(gate, up), silu(gate) * up, exact)


def test_half_precision_rounds_where_a_model_does() -> None:
    """So that keys of a step equal those of a prompt."""
    query, key = (drawn((3, heads, 1, 16), torch.bfloat16, heads) for heads in (4, 2))
    cos, sin = (drawn((3, 1, 1, 16), torch.bfloat16, seed) for seed in (1, 2))
    arguments = query, key, cos, sin, None, None, EPS
    for ours, theirs in zip(
        triton_kernels.rotate(*arguments), operators.rotate(*arguments), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_step_is_as_near_to_exact_numbers_as_a_plain_one(dtype: torch.dtype) -> None:
    """With the strides that joint products give heads and gates."""
    model = deepcopy(family_model("qwen3")).to(DEVICE, dtype)
    exact_model = deepcopy(model).double()
    token_ids = torch.tensor([[3], [7], [4]], device=DEVICE)
    position_ids = torch.tensor([[0], [9], [5]], device=DEVICE)

    def logits(of: Any) -> Tensor:
        # Each token attends to itself alone: no mask, and no values that are read to make one.
        given = {"position_ids": position_ids, "attention_mask": {"full_attention": None}}
        found: Tensor = of(input_ids=token_ids, use_cache=False, **given).logits
        return found

    with torch.inference_mode():
        recording = record(lambda: logits(model))
        assert sum(fuse(recording).values()) == 9 + 2 + 2 + 4
        for node in recording.graph.nodes:
            if str(node.target).startswith("kvpolicy."):
                name = node.target._schema.name.removeprefix("kvpolicy::")
                node.target = getattr(triton_kernels, name)
        assert_as_near(recording.program()(), recording.output, logits(exact_model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_as_near_to_exact_numbers_as_plain_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine runs them on a GPU; their tokens have the strides of joint products, too."""
    operations = ("norm", "add_norm", "rotate", "gate")
    kernels = {
        getattr(torch.ops.kvpolicy, name).default: getattr(triton_kernels, name)
        for name in operations
    }
    monkeypatch.setattr(fused_prompts, "kernels_on", lambda _: kernels)
    model = deepcopy(family_model("qwen3")).to(DEVICE, dtype)
    adapter, exact = ModelAdapter(model), ModelAdapter(deepcopy(model).double())
    tokens = torch.randint(1, 60, (2, 5), generator=torch.Generator().manual_seed(0))

    def logits(of: ModelAdapter, *, fuses: bool) -> Tensor:
        shapes = of.layer_shapes()
        step = EagerStep(KVCache(shapes, [Slab(5)] * len(shapes), 2), [0, 1], [5, 5])
        return of.forward(ForwardInput(tokens, step, fuses=fuses))[0]

    found = logits(adapter, fuses=True)
    assert adapter.prompts_problem is None
    assert_as_near(found, logits(adapter, fuses=False), logits(exact, fuses=False))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU runs the operators that are replaced")
@pytest.mark.parametrize("size", [4096, operators.LONGEST_ROW])
def test_long_rows_are_held_at_once(size: int) -> None:
    states, weight = (drawn(shape, torch.bfloat16, 1) for shape in ((4, 1, size), (size,)))
    found = torch.ops.kvpolicy.norm(states, weight.contiguous(), EPS)
    torch.testing.assert_close(found, operators.norm(states, weight, EPS))
