"""The forward of a static step is one graph, and a compiled one gives the same tokens."""

from typing import Any, ClassVar

import attrs
import pytest
import torch
from families import FAMILIES, WINDOW, family_model
from tiny import tiny_model
from torch import Tensor
from torch._dynamo.utils import counters

from kvpolicy import Engine, Plan, Request, hookimpl
from kvpolicy.engine.requests.request import Sampling
from kvpolicy.errors import HookError, ModelError
from kvpolicy.model import static_forward

pytestmark = pytest.mark.usefixtures("no_compiler")

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6]
PLANS = {
    "h2o": Plan.uniform("h2o", "protect", budget=12, buffer=5),
    "snapkv": Plan.uniform("snapkv", "protect", budget=16, buffer=4),
}
EAGER = {"mixtral", "qwen3_moe", "gpt_oss"}
QUICK = {"qwen3": "h2o", "gemma2": "snapkv"}
CASES = [
    pytest.param(family, plan, marks=[] if QUICK.get(family) == plan else pytest.mark.nightly)
    for family in sorted(FAMILIES.keys() - EAGER)
    for plan in PLANS
]


def requests(*, lengths: tuple[int, int, int] = (40, 40, 40), drawn: bool = False) -> list[Request]:
    return [
        Request(prompt, length, Sampling(temperature=0.8, top_p=0.9, top_k=9, seed=seed))
        if drawn and seed
        else Request(prompt, length)
        for seed, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]


def tokens(model: object, plan: Plan, given: list[Request], **options: object) -> list[tuple]:
    run = Engine(model, plan=plan, slots=3, **options).generate(given)
    return [result.tokens for result in run.results()]


@pytest.mark.parametrize("family", sorted(EAGER))
def test_families_with_experts_take_the_eager_path(family: str) -> None:
    engine = Engine(family_model(family), plan=PLANS["h2o"])
    assert engine.eager_reason is not None


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "plan"), CASES)
def test_a_family_is_one_graph_through_steps_and_compactions(family: str, plan: str) -> None:
    # A layer whose slab holds its whole window is never compacted; these have such layers only.
    model = family_model(family, window=30 if family in {"mistral", "phi3"} else WINDOW)
    engine = Engine(model, plan=PLANS[plan], slots=3, compile=True)
    run = engine.generate(requests())
    compiled = [result.tokens for result in run.results()]
    assert run.report.compactions > 6
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert compiled == tokens(model, PLANS[plan], requests())


@pytest.mark.slow
def test_tokens_are_drawn_in_the_graph() -> None:
    model, given = tiny_model(), requests(drawn=True)
    assert tokens(model, PLANS["h2o"], given, compile=True) == tokens(model, PLANS["h2o"], given)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.nightly
def test_several_steps_are_read_together() -> None:
    model, given = tiny_model(), requests(drawn=True)
    several = tokens(model, PLANS["h2o"], given, compile=True, steps_per_read=2)
    assert several == tokens(model, PLANS["h2o"], given)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.nightly
def test_batches_of_any_width_need_few_graphs_once() -> None:
    model, given = tiny_model(), requests(lengths=(20, 30, 40))
    engine = Engine(model, plan=PLANS["h2o"], slots=3, compile=True)
    reports = []
    for _ in range(2):
        run = engine.generate(given)
        assert [result.tokens for result in run.results()] == tokens(model, PLANS["h2o"], given)
        # The first width, all widths from 2, one sequence.
        assert counters["stats"]["unique_graphs"] == 3
        reports.append(run.report)
    first, second = reports
    assert first.path == "static, compiled"
    assert first.compile_s + second.compile_s == pytest.approx(engine.compile_s)
    assert second.compile_s < first.compile_s / 2  # what is counted is the first call of a width


@pytest.mark.nightly
def test_only_the_time_of_the_whole_run_includes_compiling() -> None:
    run = Engine(tiny_model(), plan=PLANS["h2o"], slots=3, compile=True).generate(requests())
    results, report = run.results(), run.report
    assert 0 < report.decode_s <= report.elapsed_s - report.prefill_s - report.compile_s
    assert all(0 < one.decode_s <= report.elapsed_s - report.compile_s for one in results)


@attrs.define(eq=False)
class Push:
    """Steers with what it remembers."""

    vector: Tensor
    fails_after: int = 10**9
    calls: int = 0

    @hookimpl
    def steer(self, hidden_states: Tensor, token_ids: Tensor) -> Tensor | None:
        self.calls += 1
        if self.calls > self.fails_after:
            msg = "no more"
            raise RuntimeError(msg)
        is_even = (token_ids % 2 == 0).to(hidden_states.dtype)
        return self.vector * is_even[:, None]


@pytest.mark.nightly
def test_policies_steer_within_the_graph() -> None:
    model, given = tiny_model(), requests()
    plain = tokens(model, Plan.uniform("full"), given)
    answers, calls = [], []
    for compiled in (True, False):
        push = Push(torch.linspace(-3, 3, 32))
        plan = Plan.uniform("full", push)
        answers.append(tokens(model, plan, given, compile=compiled))
        calls.append(push.calls)
    assert answers[0] == answers[1] != plain
    assert calls[0] == calls[1] > 30
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.nightly
def test_an_error_of_a_steering_policy_passes_through_the_graph() -> None:
    plan = Plan.uniform("full", Push(torch.zeros(32), fails_after=5))
    with pytest.raises(HookError, match="no more"):
        tokens(tiny_model(), plan, requests(), compile=True)
    push = Push(torch.zeros(32), fails_after=5)
    engine = Engine(
        tiny_model(), plan=Plan.uniform("full", push), on_hook_error="answer", compile=True
    )
    assert [one.finish_reason for one in engine.generate(requests()).results()] == ["error"] * 3


@attrs.define(eq=False)
class Watch:
    """Adds up the hidden states that it observes."""

    seen: list[float] = attrs.field(factory=list)

    @hookimpl
    def observe(self, hidden_states: Tensor) -> None:
        self.seen.append(float(hidden_states.double().sum()))


@pytest.mark.nightly
def test_hidden_states_leave_the_graph() -> None:
    model, given, seen = tiny_model(), requests(), []
    for compiled in (True, False):
        watch = Watch()
        plan = Plan.uniform("streaming", watch, budget=12, buffer=5)
        tokens(model, plan, given, compile=compiled)
        seen.append(watch.seen)
    assert len(seen[0]) == len(seen[1]) > 3
    assert seen[0] == pytest.approx(seen[1], abs=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


@attrs.define(eq=False, kw_only=True)
class Annotations:
    """Scores rows by what enters the attention, their keys, values and positions."""

    tracks: ClassVar[tuple[str, ...]] = ("a", "b")

    annotates_in_step: bool = True
    fails_after: int = 10**9
    calls: int = 0

    @hookimpl
    def annotate(
        self, states: Tensor, keys: Tensor, values: Tensor, positions: Tensor
    ) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls > self.fails_after:
            msg = "no more"
            raise RuntimeError(msg)
        a = states.sin().sum(dim=1, keepdim=True) + positions[:, None] % 5
        return {"b": (keys + values).sum(dim=2), "a": a.expand(keys.shape[:2])}

    @hookimpl
    def score(self, tracks: Any, attn_sums: Tensor) -> Tensor:
        return tracks["a"] + tracks["b"] + 0 * attn_sums


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "in_step"),
    [
        ("qwen3", True),
        pytest.param("gemma2", True, marks=pytest.mark.slow),
        pytest.param("phi3", False, marks=pytest.mark.slow),
    ],
)
def test_policies_annotate_within_the_graph(family: str, in_step: bool) -> None:
    model, given = family_model(family, window=30 if family == "phi3" else 9), requests()
    answers, calls = [], []
    for compiled in (True, False):
        annotations = Annotations(annotates_in_step=in_step)
        plan = Plan.uniform(annotations, budget=12, buffer=5)
        answers.append(tokens(model, plan, given, compile=compiled, steps_per_read=2))
        calls.append(annotations.calls)
    assert answers[0] == answers[1] != tokens(model, Plan.uniform("full"), given)
    assert calls[0] == calls[1] > 10
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.nightly
def test_an_error_of_an_annotating_policy_passes_through_the_graph() -> None:
    annotations = Annotations(fails_after=9)
    plan = Plan.uniform(annotations, budget=12, buffer=5)
    with pytest.raises(HookError, match="no more"):
        tokens(tiny_model(), plan, requests(), compile=True)
    annotations.calls = 0
    engine = Engine(tiny_model(), plan=plan, slots=3, on_hook_error="answer", compile=True)
    assert [one.finish_reason for one in engine.generate(requests()).results()] == ["error"] * 3


def test_a_model_on_the_eager_path_cannot_be_compiled() -> None:
    with pytest.raises(ModelError, match="compiled"):
        Engine(family_model("mixtral"), plan=PLANS["h2o"], compile=True)
    with pytest.raises(ModelError, match="static"):
        Engine(tiny_model(), plan=PLANS["h2o"], compile=True, eager=True)


def test_a_missing_compiler_is_answered_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_forward, "BACKEND", "inductor")

    def refuse() -> str:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", refuse)
    with pytest.raises(ModelError) as caught:
        Engine(tiny_model(), plan=PLANS["h2o"], compile=True)
    message = str(caught.value)
    assert "torch finds no C++ compiler that it can use" in message
    assert "\n" not in message


def test_packed_weights_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_forward, "BACKEND", "inductor")
    monkeypatch.setattr("kvpolicy.model.packed.MIN_BYTES", 0)
    with pytest.raises(ModelError, match="packed"):
        Engine(tiny_model(), plan=PLANS["h2o"], compile=True, cpu_weights="packed")


@pytest.mark.nightly
def test_a_model_that_breaks_the_graph_is_named() -> None:
    model = tiny_model()

    def reads(module: object, given: tuple[Tensor]) -> None:
        if given[0].sum() > 1e9:
            raise ValueError

    model.model.norm.register_forward_pre_hook(reads)
    engine = Engine(model, plan=PLANS["h2o"], compile=True)
    with pytest.raises(ModelError, match="LlamaForCausalLM"):
        engine.generate(requests()).results()
