"""Steps that are run from recordings are those of the model, to the last bit with plain weights."""

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest
import torch
from families import family_model
from tiny import shared_model, tiny_model
from torch import Tensor, nn

from kvpolicy import Engine, Plan, Request, hookimpl, packed_model
from kvpolicy.engine.engine import Run
from kvpolicy.engine.requests.request import Sampling
from kvpolicy.model import packed, recorded

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6]
TIGHT = {"budget": 12, "buffer": 5}
NEVER = 10**9


@pytest.fixture(autouse=True)
def records_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "STEPS_BEFORE", 3)


def requests(*, drawn: bool = False) -> list[Request]:
    """Of lengths such that the batch becomes narrower, twice."""
    samplings = [Sampling(0.8 * (drawn and seed > 0), seed=seed) for seed in range(3)]
    given = zip(PROMPTS, (14, 25, 50), samplings, strict=True)
    return [Request(*one, stop_ids=()) for one in given]


def outcome(
    model: Any,
    plan: Plan,
    given: list[Request] | None = None,
    after_10: Callable[[Run], None] = lambda run: None,
) -> tuple[list[Any], list[Tensor], str]:
    """Tokens, the tensors of the cache, and the path, of a run to which something is done."""
    run = Engine(model, None, plan, slots=3).generate(given or requests())
    for _ in range(10):
        run.step()
    after_10(run)
    for _ in range(10):
        run.step()
    tensors = [one.clone() for layer in run.cache.layers for one in layer.tensors]
    results = run.results()
    return [one.tokens for one in results], tensors, run.report.path


def check_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert len(found[1]) == len(expected[1])
    assert all(map(torch.equal, found[1], expected[1]))


def plainly(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "STEPS_BEFORE", NEVER)
        found = outcome(*args, **options)
    assert found[2] == "static"
    return found


PLANS: dict[str, Plan] = {
    "full": Plan.uniform("full"),
    "streaming": Plan.uniform("streaming", **TIGHT),
    "h2o": Plan.uniform("h2o", **TIGHT),
    "rkv": Plan.uniform("rkv", **TIGHT),
    "int8": Plan.uniform("h2o", rows="int8", **TIGHT),
}


@pytest.mark.parametrize("name", PLANS)
def test_numbers_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(shared_model(), PLANS[name])
    assert found[2] == "static, recorded"
    check_same(found, plainly(monkeypatch, shared_model(), PLANS[name]))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "olmo2"])
def test_other_models_and_drawn_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = family_model(family, window=9), requests(drawn=True)
    found = outcome(model, PLANS["h2o"], given)
    assert found[2] == "static, recorded"
    check_same(found, plainly(monkeypatch, model, PLANS["h2o"], given))


@pytest.mark.parametrize("form", ["packed", "int8"])
def test_packed_weights(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "int8":
        pytest.importorskip("numba")
    monkeypatch.setattr(packed, "MIN_BYTES", 0)
    model = packed_model(tiny_model(), cpu_weights=form)
    found = outcome(model, PLANS["h2o"])
    assert found[2] == "static, recorded"
    plain = plainly(monkeypatch, model, PLANS["h2o"])
    assert found[0] == plain[0]
    for ours, theirs in zip(found[1], plain[1], strict=True):  # they may be fused
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model().to(dtype)
    found = outcome(model, PLANS["h2o"])
    assert found[2] == "static, recorded"
    check_same(found, plainly(monkeypatch, model, PLANS["h2o"]))


def _double(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    return output * 2


def _with_hook(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.register_forward_hook(_double)


def _with_hook_of_a_norm(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.register_forward_hook(_double)


def _with_another_weight(model: Any) -> None:
    norm = model.model.norm
    norm.weight = nn.Parameter(norm.weight.detach() * 3 + torch.arange(len(norm.weight)))


def _with_changed_numbers(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-2)


def _with_moved_numbers(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data * -2


def _with_another_forward(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    own = layer.forward
    layer.forward = lambda states: own(states) * -2


def _with_another_module(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    torch.manual_seed(3)
    mlp.up_proj = nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features, bias=False)


def _with_another_setting(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


CHANGES = [
    _with_hook,
    _with_hook_of_a_norm,
    _with_another_weight,
    _with_changed_numbers,
    _with_moved_numbers,
    _with_another_forward,
    _with_another_module,
    _with_another_setting,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_changed_meanwhile_counts_from_the_next_step(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(model: Any) -> dict[str, Any]:
        return {"model": model, "plan": PLANS["h2o"], "after_10": lambda run: change(model)}

    found = outcome(**changed(tiny_model()))
    assert found[2] == "static, recorded"
    check_same(found, plainly(monkeypatch, **changed(tiny_model())))
    unchanged = outcome(tiny_model(), PLANS["h2o"])
    assert not all(map(torch.equal, found[1], unchanged[1]))


@attrs.define(eq=False)
class Louder:
    """Steers: it makes the states of a layer larger."""

    @hookimpl
    def steer(self, layer_idx: int, hidden_states: Tensor) -> Tensor:
        return hidden_states * 0.1


def test_steps_that_policies_steer_are_run_as_they_are() -> None:
    plan = Plan.uniform("h2o", Louder(), **TIGHT)
    assert outcome(shared_model(), plan)[2] == "static"


def test_what_reads_a_number_is_not_recorded() -> None:
    model = tiny_model()

    def forward(states: Tensor) -> Tensor:
        return states * (1 if float(states.sum()) > 0 else 2)

    model.model.norm.forward = forward
    tokens, _, path = outcome(model, PLANS["h2o"])
    assert path.startswith("static, not recorded: ")
    assert [len(one) for one in tokens] == [25, 50]


@attrs.define(eq=False)
class Annotator:
    """Annotates rows in a step, with a constant of torch or with a number that it reads.

    Attributes:
        reads: Whether it reads one.
    """

    reads: bool
    tracks: ClassVar[tuple[str, ...]] = ("a",)
    annotates_in_step: ClassVar[bool] = True

    @hookimpl
    def annotate(self, keys: Tensor) -> dict[str, Tensor]:
        numbers = keys.to(torch.promote_types(keys.dtype, torch.float32)).sum(dim=2)
        return {"a": numbers * (float(numbers.sum()) if self.reads else 1)}


@pytest.mark.parametrize("reads", [False, True])
def test_policies_that_annotate_in_a_step(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.uniform("streaming", Annotator(reads), **TIGHT)
    found = outcome(shared_model(), plan)
    assert found[2].startswith("static, not recorded: " if reads else "static, recorded")
    check_same(found, plainly(monkeypatch, shared_model(), plan))


def test_tokens_of_before_a_recording_may_be_read_after_it() -> None:
    engines = [Engine(shared_model(), None, PLANS["full"], steps_per_read=num) for num in (1, 2)]
    found = []
    for engine in engines:
        run = engine.generate(requests())
        found.append([result.tokens for result in run.results()])
        assert run.report.path == "static, recorded"
    assert found[0] == found[1]


def test_requests_that_come_and_go_have_the_tokens_that_they_have_alone() -> None:
    prompts = [prompt[:length] for prompt in PROMPTS for length in (2, 9)]
    engine = Engine(shared_model(), None, PLANS["h2o"], slots=4)
    run = engine.open_run(max_len=80)
    given = [Request(prompt, 20 + 7 * number, stop_ids=()) for number, prompt in enumerate(prompts)]
    found, waiting = {}, [*given]
    while run.num_open or waiting:
        if waiting and run.num_open < 4:
            run.submit(waiting.pop(0))
        found |= {result.id: result.tokens for result in run.step().results}
    assert run.report.path == "static, recorded"
    for number, request in enumerate(given):
        (alone,) = engine.generate([request]).results()
        assert found[number] == alone.tokens
