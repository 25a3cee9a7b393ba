"""Steps replayed from graphs, with a stand-in for CUDA's that records calls."""

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest
import torch
from arrivals import check_alike
from static_steps import begin_decode
from tiny import tiny_model
from torch import Tensor

from kvpolicy import Engine, Plan, Request, hookimpl
from kvpolicy.cache import static_step
from kvpolicy.cache.static_step import StaticStep, width_for
from kvpolicy.engine.requests.request import Sampling
from kvpolicy.engine.runner import Runner
from kvpolicy.engine.tracing import recording
from kvpolicy.model.fused import step as fused_step
from kvpolicy.model.fused.step import Output
from kvpolicy.model.graphs import Graph, GraphRunner

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6, [9] * 5, [4, 4]]
PLAN = Plan.uniform("h2o", "protect", budget=12, buffer=5)


def requests(lengths: tuple[int, ...] = (40, 12, 25, 33, 18), *, drawn: bool = False) -> list:
    samplings = [Sampling(0.8 * (drawn and seed % 2), seed=seed) for seed in range(5)]
    return [Request(*one) for one in zip(PROMPTS, lengths, samplings, strict=True)]


@attrs.define
class Recorder:
    """Captures by running what it is given a few times, and runs it again for a replay.

    Like a CUDA graph, a replay writes to the tensors of the capture.
    """

    step: StaticStep | None = None
    widths: list[int] = attrs.field(factory=list)
    num_replays: int = 0
    fails_at: int | None = None
    error: Exception | None = None

    def __call__(self, run: Callable[[], Output]) -> Graph:
        if len(self.widths) == self.fails_at and self.error is not None:
            raise self.error
        assert self.step is not None
        width, drawn_by = self.step.width, self.step.drawn_by
        self.widths.append(width)
        assert not self.step.live.any()
        for _ in range(3):
            logits, states = run()

        def replay() -> None:
            assert self.step is not None
            assert (self.step.width, self.step.drawn_by) == (width, drawn_by)
            self.num_replays += 1
            new_logits, new_states = run()
            logits.copy_(new_logits)
            if states is not None:
                states.copy_(new_states)

        return Graph(replay, (logits, states))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Let engines run steps as on a GPU, except for CUDA itself."""
    recorder, init = Recorder(), Runner.__init__

    def with_graphs(runner: Runner, *args: Any, **options: Any) -> None:
        init(runner, *args, **options)
        if (step := runner.static) is not None:
            step._padded = step.in_graph = True
            recorder.step = step
            runner.graphs = GraphRunner(runner.as_it_is, recorder)

    monkeypatch.setattr(Runner, "__init__", with_graphs)
    return recorder


def tokens(
    given: list[Request], model: object = None, plan: Plan = PLAN, **options: object
) -> list[tuple]:
    model = tiny_model() if model is None else model
    run = Engine(model, plan=plan, slots=5, **options).generate(given)
    return [result.tokens for result in run.results()]


@pytest.mark.few(1)
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("steps_per_read", [1, 2])
def test_replayed_steps_give_the_same_tokens(
    drawn: bool, steps_per_read: int, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = tokens(requests(drawn=drawn), steps_per_read=steps_per_read)
    num_replays = recorder.num_replays
    monkeypatch.undo()
    assert replayed == tokens(requests(drawn=drawn))
    assert num_replays >= 39
    assert recorder.num_replays == num_replays


@attrs.define(eq=False)
class Notes:
    """Annotates rows, in chunks of prompts as well."""

    tracks: ClassVar[tuple[str, ...]] = ("norm",)

    @hookimpl
    def annotate(self, keys: Tensor) -> dict[str, Tensor]:
        return {"norm": keys.norm(dim=-1)}


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("asked", ["nothing", "log-probabilities", "annotations", "no graphs"])
def test_prompts_are_fused_where_steps_are_replayed(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless more of a forward is asked for than attention."""
    model = tiny_model()
    evicts = {} if "log" in asked else {"budget": 12, "buffer": 5}
    stack = ["full"] if "log" in asked else ["h2o", *([Notes()] * (asked == "annotations"))]
    plan = Plan.uniform(*stack, **evicts)
    given = [attrs.evolve(one, prompt_logprobs=1 if "log" in asked else None) for one in requests()]

    def texts() -> tuple[Engine, list[Any]]:
        engine = Engine(model, plan=plan, slots=5, eager=asked == "no graphs")
        return engine, [one.tokens for one in engine.generate(given).results()]

    engine, found = texts()
    prompts = engine.adapter._prompts
    assert (prompts is not None) == (asked == "nothing")
    assert prompts is None or prompts.fused is not None
    monkeypatch.undo()
    _, expected = texts()
    assert found == expected


@pytest.mark.parametrize("heads", ["own", "shared"])
@pytest.mark.parametrize("rows", ["int8", "int4"])
def test_replayed_steps_over_integers_give_the_same_tokens(
    rows: str, heads: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New rows go to fixed places, as integers and as exact copies."""
    plan = Plan.uniform("h2o", "protect", budget=12, buffer=5, rows=rows, heads=heads)
    replayed = tokens(requests(), plan=plan, steps_per_read=2)
    num_replays = recorder.num_replays
    monkeypatch.undo()
    assert replayed == tokens(requests(), plan=plan)
    assert num_replays >= 39


def test_replayed_steps_give_the_same_processed_tokens(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of five slots take part at the end, whose step serves all, and then three of four."""
    penalty = Sampling(repetition_penalty=1.3)
    given = [attrs.evolve(one, sampling=penalty) for one in requests()[:3]] + requests()[3:]
    replayed = tokens(given, steps_per_read=2)
    assert recorder.num_replays > 0
    monkeypatch.undo()
    assert replayed == tokens(given)
    assert replayed[0] != tokens(requests())[0]


@attrs.define(eq=False)
class Reads:
    tokens: list[int] = attrs.field(factory=list)
    states: list[Tensor] = attrs.field(factory=list)

    @hookimpl
    def observe(self, token_ids: Tensor, hidden_states: Tensor) -> None:
        self.tokens += token_ids.tolist()
        self.states.append(hidden_states.clone())


def test_states_are_observed_whoever_draws_the_tokens(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host draws tokens from processed logits; steps serve more slots than take part."""
    penalty = Sampling(repetition_penalty=1.3)
    given = [attrs.evolve(one, sampling=penalty) for one in requests()[:3]]

    def observed() -> Reads:
        policy = Reads()
        plan = Plan.uniform("streaming", policy, budget=12, buffer=5)
        engine = Engine(tiny_model(dtype=torch.float64), plan=plan, slots=5)
        engine.generate([*given, *requests()[3:]]).results()
        return policy

    replayed = observed()
    assert recorder.num_replays > 0
    monkeypatch.undo()
    expected = observed()
    assert replayed.tokens == expected.tokens
    torch.testing.assert_close(torch.cat(replayed.states), torch.cat(expected.states))


@pytest.mark.few(1)
@pytest.mark.parametrize("steps_per_read", [1, 2])
def test_replayed_steps_give_the_same_log_probabilities(
    steps_per_read: int, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay overwrites the logits of the one before."""
    given = [attrs.evolve(one, logprobs=2) for one in requests(drawn=False)]

    def found(**options: int) -> list[Any]:
        model = tiny_model(dtype=torch.float64)
        run = Engine(model, plan=PLAN, slots=5, **options).generate(given)
        return [result.logprobs for result in run.results()]

    replayed = found(steps_per_read=steps_per_read)
    assert recorder.num_replays > 0
    monkeypatch.undo()
    for ours, theirs in zip(replayed, found(), strict=True):
        check_alike(ours, theirs)


def test_the_widest_graph_is_captured_first_and_each_width_once(recorder: Recorder) -> None:
    engine = Engine(tiny_model(), plan=PLAN, slots=5)
    run = engine.generate(requests())
    while not run.done:
        run.step()
    assert recorder.widths == [5, 4, 2, 1]
    assert run.report.path == "static, fused, in graphs"


def test_a_batch_that_is_never_full_captures_its_widest_graph_first(recorder: Recorder) -> None:
    engine = Engine(tiny_model(), plan=PLAN, slots=5)
    given = requests()
    run = engine.generate(given)
    run.cancel(4)
    run.results()
    assert recorder.widths[:2] == [5, 4]


def test_slots_that_draw_in_another_way_need_another_graph(recorder: Recorder) -> None:
    tokens(requests((30,) * 5))
    assert recorder.widths == [5]
    given = [Request([3], 5, Sampling(0.5, seed=1)), *requests((30,) * 5)[1:]]
    recorder.widths.clear()
    tokens(given)
    assert recorder.widths == [5, 5, 4]  # greedy alone, once the first has ended


def test_weights_at_another_address_are_captured_again(recorder: Recorder) -> None:
    model = tiny_model()
    run = Engine(model, plan=PLAN, slots=5).generate(requests((30,) * 5))
    for _ in range(4):
        run.step()
    assert recorder.widths == [5]
    for _ in range(2):
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
        run.step()
        run.step()
    assert recorder.widths == [5, 5, 5]


class CompilationError(Exception):
    """Like that of Triton, which is no `RuntimeError`."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("operation not permitted when stream is capturing"),
        CompilationError("at 1:0"),
        OSError("No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_step_that_cannot_be_captured_runs_without(
    error: Exception, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.fails_at, recorder.error = 1, error
    run = Engine(tiny_model(), plan=PLAN, slots=5).generate(requests())
    replayed = [result.tokens for result in run.results()]
    assert recorder.widths == [5]
    reason = f"a step cannot be captured: {type(error).__name__}: {error}"
    assert run.report.path == f"static, without graphs: {reason}"
    monkeypatch.undo()
    assert replayed == tokens(requests())


@pytest.mark.parametrize("problem", ["other numbers", "no kernel"])
def test_a_step_that_cannot_be_fused_is_captured_as_it_is(
    problem: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fuse(recording: Any, *, joins: bool) -> dict[str, int]:
        assert joins
        if problem == "no kernel":
            raise CompilationError
        for node in list(recording.graph.nodes):
            if node.target is torch.ops.aten.silu.default:
                node.target = torch.ops.aten.relu.default
        return {"gates": 2}

    monkeypatch.setattr(fused_step, "fuse", fuse)
    run = Engine(tiny_model(), plan=PLAN, slots=5).generate(requests())
    replayed = [result.tokens for result in run.results()]
    assert recorder.widths == [5, 4, 2, 1]
    assert run.report.path.startswith("static, in graphs, not fused: ")
    monkeypatch.undo()
    assert replayed == tokens(requests())


def test_weights_of_joint_products_are_moved_before_anything_is_captured(
    recorder: Recorder,
) -> None:
    model = tiny_model()
    before = model.state_dict()
    before = {name: one.clone() for name, one in before.items()}
    assert tokens(requests(), model) == tokens(requests(), model)
    assert recorder.widths == [5, 4, 2, 1] * 2
    first, second = (
        model.model.layers[0].mlp.get_submodule(n).weight for n in ("gate_proj", "up_proj")
    )
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    after = model.state_dict()
    assert all(torch.equal(after[name], one) for name, one in before.items())


def test_a_model_with_hooks_runs_without_graphs(recorder: Recorder) -> None:
    model, seen = tiny_model(), []
    model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    run = Engine(model, plan=PLAN, slots=5).generate(requests((9,) * 5))
    run.results()
    assert recorder.widths == []
    assert run.report.path.startswith("static, without graphs: modules of the model have hooks")
    assert len(seen) > 8


def test_hooks_of_policies_that_observe_are_captured(recorder: Recorder) -> None:
    run = Engine(tiny_model(), plan=Plan.uniform("skipkv", budget=40, buffer=9)).generate([[3, 4]])
    assert run.core.runner.graphs is not None


@attrs.define(eq=False, kw_only=True)
class Annotations:
    """Scores rows by what enters the attention."""

    tracks: ClassVar[tuple[str, ...]] = ("size",)

    annotates_in_step: bool = True
    fails_at: int | None = None
    calls: int = 0

    @hookimpl
    def annotate(self, states: Tensor, keys: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls == self.fails_at:
            msg = "no annotation"
            raise ValueError(msg)
        size = states.sin().sum(dim=1, keepdim=True) + 100
        return {"size": size.expand(keys.shape[:2])}

    @hookimpl
    def score(self, tracks: Any) -> Tensor:
        assert (tracks["size"] > 0).all()
        return tracks["size"]


@pytest.mark.few(1)
@pytest.mark.parametrize("in_step", [True, False])
def test_annotations_are_captured(
    in_step: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> list[tuple]:
        plan = Plan.uniform(Annotations(annotates_in_step=in_step), budget=12, buffer=5)
        engine = Engine(tiny_model(), plan=plan, slots=5, steps_per_read=2)
        return [result.tokens for result in engine.generate(requests()).results()]

    replayed = results()
    assert recorder.num_replays >= 39
    monkeypatch.undo()
    assert replayed == results()


def test_a_step_that_was_captured_without_its_annotations_is_captured_again(
    recorder: Recorder,
) -> None:
    annotations = Annotations(
        fails_at=4
    )  # two layers of the prompts, then the second layer of the capture
    plan = Plan.uniform(annotations, budget=12, buffer=5)
    engine = Engine(tiny_model(), plan=plan, slots=5, on_hook_error="answer")
    run = engine.generate([*requests((30,) * 5), *requests((30,) * 5)])
    reasons = [result.finish_reason for result in run.results()]
    assert reasons == ["error"] * 5 + ["length"] * 5
    assert recorder.widths[:2] == [5, 5]


def test_calls_are_recorded_without_graphs(recorder: Recorder) -> None:
    annotations = Annotations()
    engine = Engine(tiny_model(), plan=Plan.uniform(annotations, budget=12, buffer=5), slots=5)
    with recording(engine) as trace:
        engine.generate(requests((9,) * 5)).results()
    assert recorder.widths == []
    assert sum(call.hook == "annotate" for call in trace.calls) == annotations.calls == 2 * 9


@pytest.mark.parametrize("plan", [PLAN, Plan.uniform(Annotations(), budget=12, buffer=5)])
def test_a_step_in_which_no_slot_takes_part_changes_nothing(plan: Plan) -> None:
    engine = Engine(tiny_model(), plan=plan, slots=5, steps_per_read=2)
    run = engine.generate(requests(drawn=True))
    for _ in range(15):
        run.step()
    given = begin_decode(run)
    given.draws, step = True, given.step
    step.in_graph = True
    state = [step.token_ids, step.seq_len, step.rows, step.live, step._num_steps]
    everything = [*state, *(one for layer in run.cache.layers for one in layer.tensors)]
    before = [one.clone() for one in everything]
    with step.idle(2):
        engine.adapter.forward(given)
    assert all(map(torch.equal, everything, before))
    engine.adapter.forward(given)
    assert not any(map(torch.equal, state[:3], before[:3]))


def test_widths_are_powers_of_two_up_to_all_slots() -> None:
    widths = [width_for(num, 37) for num in range(1, 38)]
    assert all(width >= num for num, width in enumerate(widths, 1))
    assert set(widths) == {1, 2, 4, 8, 16, 32, 37}
    assert static_step.width_for(1, 1) == 1
