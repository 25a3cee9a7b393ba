"""Chunks of prompts run from a recording, in fewer operators, and give what the model gives."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from allocations import peak_allocated
from families import FAMILIES, FUSED, FUSED_IN_HALF, family_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy import Engine, Plan, Request
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.engine.runner import Runner
from kvpolicy.model import fused_prompts
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.forward_input import ForwardInput
from kvpolicy.model.fused import extents
from kvpolicy.model.fused.extents import tell_extents
from kvpolicy.model.fused.record import NotRecordableError, record

KINDS = ("norms", "rotations", "gates", "joint products")
PROMPTS = [[5, 9, 40, 2, 2, 7, 11] * 5, [1, 2], [3, 8] * 30, [9], [4, 4] * 11]
PLANS = {
    "full": Plan.uniform("full"),
    "h2o": Plan.uniform("h2o", budget=12, buffer=5, prefill_buffer=9),
    "snapkv": Plan.uniform("snapkv", budget=24, buffer=8, prefill_buffer=16),
}


@pytest.fixture
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines run prompts as on a GPU."""
    monkeypatch.setattr(Runner, "_fuses", lambda self, _: self.static is not None)


def of_adapter(adapter: ModelAdapter, tokens: Tensor, *, fuses: bool) -> Tensor:
    """Logits after the newest of some tokens, ``[B, V]``."""
    num_sequences, num_columns = tokens.shape
    cache = adapter._small_cache(num_sequences, num_columns)
    step = EagerStep(cache, range(num_sequences), [num_columns] * num_sequences)
    logits, _ = adapter.forward(ForwardInput(tokens, step, fuses=fuses))
    return logits


def a_batch(num_sequences: int, num_columns: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(1, 60, (num_sequences, num_columns), generator=rng)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() & FUSED))
def test_families_give_what_they_give(family: str, dtype: torch.dtype) -> None:
    """In half precision as near to exact numbers as the model's own operators are."""
    model = deepcopy(family_model(family)).to(dtype)
    exact = ModelAdapter(deepcopy(model).double())
    adapter = ModelAdapter(model)
    for shape in ((1, 1), (1, 9), (3, 7)):
        tokens = a_batch(*shape)
        plain, found = (of_adapter(adapter, tokens, fuses=fuses) for fuses in (False, True))
        assert adapter.prompts_problem is None
        if dtype == torch.float32:
            torch.testing.assert_close(found, plain)
            continue
        wanted = of_adapter(exact, tokens, fuses=False)
        error, of_plain = ((one.double() - wanted).norm() for one in (found, plain))
        assert error <= 1.3 * of_plain + 1e-3 * wanted.norm()
    assert adapter._prompts is not None
    in_half = FUSED_IN_HALF if dtype == torch.bfloat16 else {}
    counts = in_half.get(family, FUSED[family])
    assert adapter._prompts.fused == dict(zip(KINDS, counts, strict=True))


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize("plan", PLANS)
def test_texts_behind_fused_prompts_are_the_same(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of several sequences, with pads, of which rows are evicted in between."""
    model = family_model("qwen3")

    def texts() -> tuple[list[Any], Engine]:
        engine = Engine(deepcopy(model), plan=PLANS[plan], slots=3)
        run = engine.generate([Request(prompt, 6) for prompt in PROMPTS])
        return [(one.tokens, one.rows_evicted) for one in run.results()], engine

    found, engine = texts()
    prompts = engine.adapter._prompts
    assert prompts is not None
    assert prompts.problem is None
    assert prompts.fused is not None
    monkeypatch.undo()
    expected, engine = texts()
    assert engine.adapter._prompts is None
    assert found == expected


def test_a_changed_model_is_recorded_again() -> None:
    model = deepcopy(family_model("llama"))
    adapter, tokens = ModelAdapter(model), a_batch(2, 5)
    before = of_adapter(adapter, tokens, fuses=True)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)  # in place: the recording reads it
    torch.testing.assert_close(of_adapter(adapter, tokens, fuses=True), 2 * before)
    weight = torch.nn.Parameter(model.model.norm.weight.detach() / 2)
    model.model.norm.weight = weight
    torch.testing.assert_close(of_adapter(adapter, tokens, fuses=True), before)
    assert adapter.prompts_problem is None


def test_hooks_of_users_run() -> None:
    model = deepcopy(family_model("llama"))
    adapter, tokens, seen = ModelAdapter(model), a_batch(1, 5), []
    expected = of_adapter(adapter, tokens, fuses=True)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(of_adapter(adapter, tokens, fuses=True), expected)
    assert len(seen) == 1
    assert "hooks" in (adapter.prompts_problem or "")
    handle.remove()
    of_adapter(adapter, tokens, fuses=True)
    assert len(seen) == 1
    assert adapter.prompts_problem is None


def multiply_by(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have recordings compute other logits than the model."""
    fuse = fused_prompts.fuse

    def wrong(recording: Any) -> Any:
        counts = fuse(recording)
        (output,) = (node for node in recording.graph.nodes if node.op == "output")
        logits, states = output.args[0]
        with recording.graph.inserting_before(output):
            other = recording.graph.call_function(torch.ops.aten.mul.Scalar, (logits, factor))
        output.args = ((other, states),)
        return counts

    monkeypatch.setattr(fused_prompts, "fuse", wrong)


def test_a_recording_that_computes_other_numbers_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiply_by(2, monkeypatch)
    adapter, tokens = ModelAdapter(deepcopy(family_model("llama"))), a_batch(1, 5)
    found = of_adapter(adapter, tokens, fuses=True)
    torch.testing.assert_close(found, of_adapter(adapter, tokens, fuses=False))
    assert "other numbers" in (adapter.prompts_problem or "")


class InFull(torch.nn.Linear):
    """A head that gives logits of 32 bits."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_may_differ_by_the_rounding_of_the_weights(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_by(1.04, monkeypatch)
    model = deepcopy(family_model("llama")).to(dtype)
    weight = model.lm_head.weight
    model.lm_head = InFull(*reversed(weight.shape), bias=False).to(dtype)
    model.lm_head.weight = weight
    adapter = ModelAdapter(model)
    of_adapter(adapter, a_batch(1, 5), fuses=True)
    assert (adapter.prompts_problem is None) == (dtype == torch.bfloat16)


def test_a_model_that_each_forward_changes_is_left_alone() -> None:
    """It would be recorded before each chunk."""
    model = deepcopy(family_model("llama"))
    norm, num_calls = model.model.norm, []
    plain = norm.forward

    def forward(states: Tensor) -> Tensor:
        num_calls.append(1)
        norm.newest = object()
        return plain(states)

    norm.forward = forward
    adapter, tokens = ModelAdapter(model), a_batch(1, 5)
    expected = of_adapter(adapter, tokens, fuses=False)
    for _ in range(8):
        num_calls.clear()
        torch.testing.assert_close(of_adapter(adapter, tokens, fuses=True), expected)
    assert len(num_calls) == 1
    assert "changes" in (adapter.prompts_problem or "")


def test_a_chunk_holds_no_more_than_the_model_does() -> None:
    adapter, tokens = ModelAdapter(deepcopy(family_model("qwen3"))), a_batch(1, 400)
    peaks = []
    for fuses in (True, False):
        of_adapter(adapter, tokens, fuses=fuses)
        peaks.append(peak_allocated(lambda fuses=fuses: of_adapter(adapter, tokens, fuses=fuses)))
    fused, plain = peaks
    assert fused <= plain


# Sizes

WEIGHT = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def recorded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of numbers ``[B, L]``, from its recording."""
    inputs = [torch.randn(*shape) for shape in (extents.FIRST, extents.SECOND)]
    with torch.inference_mode():
        first, second = (record(lambda one=one: function(one)) for one in inputs)
        tell_extents(first, second, inputs[:1], inputs[1:])
    return first.program(inputs[:1])


def heads(x: Tensor) -> Tensor:
    num_sequences, num_columns = x.shape
    states = x[..., None] * WEIGHT[0]
    by_head = states.view(num_sequences, num_columns, -1, 2).transpose(1, 2)
    return by_head.reshape(3 * num_sequences, num_columns * 2).sum(1)


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    heads,
    lambda x: x.reshape(-1, 1) @ WEIGHT[:1],
    lambda x: x.reshape(x.numel()).view(x.shape).cumsum(1),
    lambda x: WEIGHT[None].expand(x.shape[0], 4, 6) * x.mean(),
    lambda x: torch.arange(4 * x.shape[1]).view(4, -1) + x.sum(),
    lambda x: x[:, -1:] + x[:, :2],
]


@given(st.sampled_from(FUNCTIONS), st.integers(1, 7), st.integers(2, 9), st.integers(0, 99))
def test_a_recording_is_of_any_shape(
    function: Callable[[Tensor], Tensor], num_sequences: int, num_columns: int, seed: int
) -> None:
    x = torch.randn(num_sequences, num_columns, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(recorded(function)(x), function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(-1)[: x.shape[1] + 1],
        lambda x: x + x.shape[1] ** 0.5,
        lambda x: x + 1 if x.shape[1] > 4 else x * 2,
        lambda x: x + torch.tensor(range(x.shape[1])),
        lambda x: x * x.sum() if x.shape[0] > 2 else x.sum() * x.sum(),
    ],
)
def test_what_depends_on_sizes_in_another_way_is_refused(
    function: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(NotRecordableError):
        recorded(function)
