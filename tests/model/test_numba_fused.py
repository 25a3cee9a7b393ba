"""Fused operators in Numba are as near to exact numbers as the operators that they replace."""

from typing import Any

import pytest
import torch
from families import family_model
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model
from torch import Tensor
from torch.nn.functional import silu

from kvpolicy import Engine, Plan, Request, packed_model
from kvpolicy.model import recorded
from kvpolicy.model.fused import operators
from kvpolicy.model.fused.record import record
from kvpolicy.model.fused.rewrite import call_on_cpu, fuse
from kvpolicy.opaque import call_opaque

pytest.importorskip("numba")

from kvpolicy.model.fused import numba_kernels

EPS = 1e-5
ROUNDING = 1e-6
PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6]


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers within a larger tensor, as columns of a joint product are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape[:-1], shape[-1] + 3, generator=generator)[..., 2:-1]


def exact_norm(states: Tensor, weight: Tensor) -> Tensor:
    rows = []
    for row in states.double().reshape(-1, states.shape[-1]):
        mean = sum(number * number for number in row.tolist()) / len(row)
        rows.append(row / (mean + EPS) ** 0.5 * weight.double())
    return torch.stack(rows).reshape(states.shape)


def exact_rotation(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Numbers i and i + D / 2 are a point, which is turned."""
    half, turned = states.shape[-1] // 2, states.double().clone()
    cos, sin = cos.double(), sin.double()
    for i in range(half):
        x, y = states[..., i].double(), states[..., half + i].double()
        turned[..., i] = x * cos[..., i] - y * sin[..., i]
        turned[..., half + i] = y * cos[..., half + i] + x * sin[..., half + i]
    return turned


def assert_near(found: Tensor, exact: Tensor) -> None:
    assert (found.dtype, found.shape) == (torch.float32, exact.shape)
    assert (found.double() - exact).norm() <= ROUNDING * exact.norm()


@given(st.integers(1, 3), st.sampled_from([1, 5, 16, 64, 600]), st.integers(0, 99))
def test_norms(rows: int, size: int, seed: int) -> None:
    states, added = (drawn((rows, 1, size), seed + i) for i in range(2))
    weight = drawn((size,), seed + 2)
    assert_near(numba_kernels.norm(states, weight, EPS), exact_norm(states, weight))
    total, normed = numba_kernels.add_norm(states, added, weight, EPS)
    assert torch.equal(total, states + added)
    assert_near(normed, exact_norm(total, weight))


@given(st.integers(1, 3), st.sampled_from([2, 6, 32, 80]), st.booleans(), st.integers(0, 99))
def test_rotations(slots: int, dim: int, normed: bool, seed: int) -> None:
    query, key = (drawn((slots, 1, heads, dim), seed + heads).transpose(1, 2) for heads in (4, 2))
    angles = 9 * drawn((slots, 1, 1, dim), seed)
    cos, sin = angles.cos(), angles.sin()
    weights = [drawn((dim,), seed + i) for i in range(2)] if normed else [None] * 2
    found = numba_kernels.rotate(query, key, cos, sin, *weights, EPS)
    for ours, states, weight in zip(found, (query, key), weights, strict=True):
        wide = states.double() if weight is None else exact_norm(states, weight)
        assert_near(ours, exact_rotation(wide, cos, sin))


@given(st.integers(1, 3), st.sampled_from([1, 70, 1030]), st.integers(0, 99))
def test_gates(rows: int, size: int, seed: int) -> None:
    gate, up = (20 * drawn((rows, 1, size), seed + i) for i in range(2))
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    assert_near(numba_kernels.gate(gate, up), exact)


def test_gates_of_numbers_without_an_exponential() -> None:
    gate = torch.tensor([[torch.nan, torch.inf, 1e5, 89.0, -89.0, -1e5, 0.0]])
    found = numba_kernels.gate(gate, torch.ones(1, 7))
    torch.testing.assert_close(found, silu(gate), equal_nan=True)


def block(states: Tensor, weights: list[Tensor], turns: list[Tensor], norms: bool) -> Tensor:
    """What a layer does besides attention, with its strides."""

    def norm(numbers: Tensor, weight: Tensor) -> Tensor:
        return weight * (numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + EPS))

    qkv = norm(states.float(), weights[0]) @ weights[1]
    heads = [one.unflatten(-1, (-1, 6)) for one in qkv.split([12, 6, 6], dim=-1)]
    if norms:
        heads[:2] = [norm(one, weights[4]) for one in heads[:2]]
    heads = [one.transpose(1, 2) for one in heads]
    for number in range(2):
        first, second = heads[number][..., :3], heads[number][..., 3:]
        half = torch.cat((-second, first), dim=-1)
        heads[number] = heads[number] * turns[0] + half * turns[1]
    attended = (heads[0] * heads[1] + heads[2]).transpose(1, 2).flatten(2)
    total = states + attended @ weights[2]
    gate, up = (norm(total, weights[0]) @ weights[3]).split(7, dim=-1)
    return total + (silu(gate) * up) @ weights[3].T[:7]


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("slots", [1, 3])
@torch.inference_mode()
def test_a_bound_step_reads_what_its_tensors_hold_by_then(slots: int, norms: bool) -> None:
    states = torch.randn(slots, 1, 20)
    sizes = [(20,), (20, 24), (12, 20), (20, 14), (6,)]
    weights = [torch.randn(*size) for size in sizes]
    turns = [torch.randn(slots, 1, 1, 6) for _ in range(2)]
    recording = record(lambda: block(states, weights, turns, norms))
    counts = fuse(recording, joins=False)
    assert (counts["norms"], counts["rotations"], counts["gates"]) == (4 if norms else 2, 1, 1)
    call_on_cpu(recording)
    targets = [getattr(node.target, "__name__", "") for node in recording.graph.nodes]
    assert {"add_norm", "rotate", "gated"} <= set(targets)
    program, found = recording.program(), []
    for _ in range(3):
        for tensor in (states, *turns):
            tensor.normal_()
        found.append(program())
        wanted = block(states.double(), [w.double() for w in weights], turns, norms)
        torch.testing.assert_close(found[-1].double(), wanted, atol=1e-4, rtol=1e-5)
    assert not torch.equal(found[0], found[1])  # what is answered is not written over


@pytest.mark.usefixtures("packs_small_products")
@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2"])
def test_tokens_are_those_of_the_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model(family_model(family))
    tokens = []
    for before in (3, 10**9):
        monkeypatch.setattr(recorded, "STEPS_BEFORE", before)
        engine = Engine(model, None, Plan.uniform("h2o", budget=12, buffer=5), slots=3)
        run = engine.generate([Request(prompt, 30, stop_ids=()) for prompt in PROMPTS])
        tokens.append([one.tokens for one in run.results()])
        fused = run.core.runner.recorded
        assert fused is not None
        assert (fused.num_replayed > 0, fused.fuses) == (before == 3, True)
    assert tokens[0] == tokens[1]


@pytest.mark.usefixtures("packs_small_products")
def test_a_row_in_a_batch_is_the_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "STEPS_BEFORE", 3)
    engine = Engine(packed_model(tiny_model()), plan=Plan.full_cache(), slots=3)
    given = [Request(prompt, 30, stop_ids=()) for prompt in PROMPTS]
    together = [one.tokens for one in engine.generate(given).results()]
    alone: list[Any] = [engine.generate([one]).results()[0].tokens for one in given]
    assert together == alone


def test_other_precisions_have_the_plain_operators() -> None:
    states, weight = drawn((2, 1, 20), 1).bfloat16(), drawn((20,), 2).bfloat16()
    found = torch.ops.kvpolicy.norm(states, weight, EPS)
    assert torch.equal(found, operators.norm(states, weight, EPS))


@pytest.mark.usefixtures("packs_small_products")
@pytest.mark.parametrize("plan", ["plain", "h2o", "snapkv", "int8", "rkv"])
@pytest.mark.parametrize("slots", [1, 3])
def test_attention_of_a_bound_step_reads_rows_as_the_model_does(
    slots: int, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"rows": "int8"} if plan == "int8" else {}
    tight: dict[str, Any] = {"budget": 12, "buffer": 5}
    held = {"plain": Plan.full_cache(), "int8": Plan.uniform("h2o", **rows, **tight)}
    model, found = packed_model(tiny_model()), []
    for before in (3, 10**9):
        monkeypatch.setattr(recorded, "STEPS_BEFORE", before)
        engine = Engine(model, None, held.get(plan) or Plan.uniform(plan, **tight), slots=slots)
        run = engine.generate([Request(prompt, 30, stop_ids=()) for prompt in PROMPTS])
        for _ in range(25):
            run.step()
        tensors = [one for layer in run.cache.layers for one in layer.tensors]
        numbers = [one.clone() for one in tensors if one.is_floating_point()]
        found.append((run.results(), numbers))
    assert [one.tokens for one in found[0][0]] == [one.tokens for one in found[1][0]]
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, equal_nan=True)


class Doubling:
    """Doubles numbers where torch does not see it."""

    def run(self, numbers: Tensor) -> Tensor:
        return torch.from_numpy(2 * numbers.numpy())

    def fixed(self, numbers: Tensor) -> Any:
        out = torch.empty(numbers.shape)

        def call() -> None:
            out.numpy()[:] = 2 * numbers.numpy()

        return call, out


@torch.inference_mode()
def test_what_torch_does_not_see_is_called_with_tensors_that_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states, weight = torch.randn(2, 1, 20), torch.randn(20)

    def norm() -> Tensor:
        return weight * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPS))

    doubling = Doubling()
    recording = record(lambda: 1 + call_opaque(doubling.run, norm()[:, 0]))
    fuse(recording, joins=False)
    call_on_cpu(recording)
    program, found = recording.program(), []
    monkeypatch.delattr(Doubling, "run")
    for _ in range(3):
        states.normal_()
        found.append(program())
        assert_near(found[-1], 1 + 2 * exact_norm(states, weight)[:, 0])
    assert not torch.equal(found[0], found[1])
