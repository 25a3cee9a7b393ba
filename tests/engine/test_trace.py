"""Recordings of hook calls are complete and correct, and do not change a run."""

import json
from collections.abc import Callable, Generator
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import Recorder
from strategies import costly, plans, prompts
from tiny import shared_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.engine.tracing import HookCall, TensorInfo, Trace, recording
from kvpolicy.errors import HookError, KVPolicyError
from kvpolicy.plan.spec import PolicySpec
from kvpolicy.state import Memory, Parts

NUM_LAYERS = 2
MODEL = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)
PROMPTS = [[1, 2, 3] * 4, [4, 5] * 9, [6, 7, 8]]


def trace_of(plan: Plan, tokenizer: Any = None, **options: Any) -> tuple[Trace, list[Any]]:
    engine = Engine(MODEL, tokenizer, plan, slots=2)
    with recording(engine, **options) as trace:
        results = engine.generate(PROMPTS, max_new_tokens=14).results()
    return trace, results


# --- completeness ---------------------------------------------------------------------------


@pytest.mark.slow
@costly
@given(prompts(count=3), st.integers(1, 3), st.integers(1, 8))
def test_every_compaction_is_recorded_with_its_shapes(
    prompts: list[list[int]], slots: int, buffer: int
) -> None:
    """The reference is a policy that records its own calls."""
    recorder = Recorder()
    plan = Plan.uniform("h2o", "protect", recorder, budget=14, buffer=buffer)
    engine = Engine(MODEL, plan=plan, slots=slots)
    with recording(engine) as trace:
        engine.generate(prompts, max_new_tokens=24).results()
    seen = [one for record in recorder.records for one in record.compactions]
    for hook in ("protect", "score", "select", "evict"):
        calls = [call for call in trace.calls if call.hook == hook]
        assert sum(len(call.requests) for call in calls) == len(seen)
    scored = [call for call in trace.calls if call.hook == "score"]
    found = sorted(
        (call.layer, *call.arguments["keys"].shape[1:]) for call in scored for _ in call.requests
    )
    assert found == sorted((one.layer_idx, *one.keys.shape) for one in seen)
    for call in scored:
        assert call.arguments["keys"].shape[0] == len(call.requests)
        assert call.arguments["budget"] == 14
        assert call.answered_by == "h2o+recorder"


@attrs.define(eq=False)
class Counts:
    """Counts the calls of each hook and returns None."""

    calls: dict[str, int] = attrs.field(factory=dict)

    def _count(self, hook: str) -> None:
        self.calls[hook] = self.calls.get(hook, 0) + 1

    @hookimpl
    def schedule(self) -> None:
        self._count("schedule")

    @hookimpl
    def observe(self) -> None:
        self._count("observe")

    @hookimpl
    def steer(self) -> None:
        self._count("steer")

    @hookimpl
    def due(self) -> None:
        self._count("due")

    @hookimpl
    def protect(self) -> None:
        self._count("protect")

    @hookimpl
    def score(self) -> None:
        self._count("score")

    @hookimpl
    def select(self) -> None:
        self._count("select")

    @hookimpl
    def evict(self) -> None:
        self._count("evict")


def test_every_hook_call_is_recorded() -> None:
    counts = Counts()
    plan = Plan.uniform("h2o", counts, budget=8, buffer=4, schedule=[counts])
    trace, _ = trace_of(plan)
    recorded = dict.fromkeys(counts.calls, 0)
    for call in trace.calls:
        recorded[call.hook] += any(part.policy == "counts" for part in call.parts)
    assert len(recorded) == 8
    assert recorded == counts.calls
    assert [call.number for call in trace.calls] == list(range(trace.num_calls))


def test_call_records_requests_and_answering_policies() -> None:
    trace, _ = trace_of(Plan.uniform("h2o", "protect", budget=14, buffer=4))
    (first, *_), (select, *_) = (
        [call for call in trace.calls if call.hook == hook] for hook in ("schedule", "select")
    )
    assert (first.requests, first.tokens, first.answer) == ((0, 1), (0, 0), [[0, 1]])
    assert (first.layer, first.answered_by) == (None, "the defaults")
    assert select.requests == (1,)
    assert select.tokens == (1,)  # the first token is sampled after prefill
    assert select.answer == TensorInfo("int64", (1, 2, 14), "cpu")
    assert "due" not in {call.hook for call in trace.calls}, "not implemented"


@attrs.define(eq=False)
class Waits:
    """A wrapper that waits before and after the wrapped call."""

    waits: Any

    @hookimpl(wrapper=True)
    def score(self) -> Generator[None, Tensor, Tensor]:
        self.waits()
        scores = yield
        self.waits()
        return scores


def test_wrapper_time_excludes_the_wrapped_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("kvpolicy.engine.tracing.time.perf_counter", lambda: now[0])

    class Slow:
        @hookimpl
        def score(self, positions: Tensor) -> Tensor:
            now[0] += 5.0
            return positions.float()

    def wait() -> None:
        now[0] += 1.0

    plan = Plan.uniform(Slow(), Waits(wait), budget=8, buffer=4)
    trace, _ = trace_of(plan, hooks=["score"])
    for call in trace.calls:
        assert {part.policy: part.us for part in call.parts} == {"slow": 5e6, "waits": 2e6}
    totals = {one.policy: one for one in trace.totals()}
    assert totals["slow"].calls == totals["waits"].calls == trace.num_calls
    assert totals["slow"].p50_us == totals["slow"].p95_us == 5e6
    assert totals["waits"].total_ms == pytest.approx(2e3 * trace.num_calls)


def test_totals_refer_to_the_time_of_the_block_only() -> None:
    trace, _ = trace_of(Plan.uniform("h2o", budget=8, buffer=4), hooks=["score"])
    assert trace.totals() == trace.totals() != []


@attrs.define(eq=False)
class AsksInOrder:
    @hookimpl
    def schedule(self, waiting: Any, num_free: int) -> list[list[int]]:
        return [[request.id for request in waiting[:num_free]]]


def test_requests_that_wait_are_recorded_by_their_numbers() -> None:
    plan = Plan.uniform("full", schedule=[AsksInOrder()])
    trace, _ = trace_of(plan, hooks=["schedule"])
    assert trace.calls[0].arguments["waiting"] == [0, 1, 2]
    assert trace.calls[-1].arguments["waiting"] == [2]


# --- no effect on the run -------------------------------------------------------------------


@pytest.mark.nightly
@given(prompts(count=3), plans(num_layers=NUM_LAYERS), st.booleans())
def test_recording_does_not_change_tokens(prompts: list[list[int]], plan: Plan, kept: bool) -> None:
    engine = Engine(MODEL, plan=plan, slots=2)
    plain = engine.generate(prompts, max_new_tokens=20).results()
    with recording(engine, kept=kept):
        traced = engine.generate(prompts, max_new_tokens=20).results()
    assert [result.tokens for result in traced] == [result.tokens for result in plain]


def test_nothing_is_recorded_after_the_recording() -> None:
    engine = Engine(MODEL, plan=Plan.uniform("h2o", "protect", budget=14, buffer=4))
    prompt, counts = [list(range(1, 30))], []
    with recording(engine) as first:
        engine.generate(prompt, max_new_tokens=20).results()
    counts.append(first.num_calls)
    engine.generate(prompt, max_new_tokens=20).results()
    with recording(engine) as second:
        engine.generate(prompt, max_new_tokens=20).results()
    counts += [first.num_calls, second.num_calls]
    assert counts[0] > 0
    assert len(set(counts)) == 1


# --- failures -------------------------------------------------------------------------------


class Raises:
    @hookimpl
    def score(self, layer_idx: int, positions: Tensor) -> Tensor:
        if layer_idx == 1:
            msg = "no such head"
            raise IndexError(msg)
        return positions.float()


class ReturnsKeys:
    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return keys


@pytest.mark.parametrize(
    "stack", [[Raises(), Waits(bool)], [ReturnsKeys()]], ids=["raises", "wrong"]
)
def test_failing_call_is_recorded_with_its_error(stack: list[object]) -> None:
    engine = Engine(MODEL, plan=Plan.uniform(*stack, budget=14, buffer=4))
    with recording(engine) as trace, pytest.raises(HookError) as caught:
        engine.generate(PROMPTS, max_new_tokens=14).results()
    last = trace.calls[-1]
    assert last.error == str(caught.value)
    assert {part.policy for part in last.parts} == set(engine.stacks[0].names)
    assert not any(call.error for call in list(trace.calls)[:-1])
    if len(stack) == 2:
        raised = {part.policy: part.error for part in last.parts}
        assert raised == {"raises": "IndexError: no such head", "waits": None}


# --- options --------------------------------------------------------------------------------


def test_only_selected_hooks_and_layers_are_recorded() -> None:
    plan = Plan.uniform("h2o", budget=14, buffer=4)
    everything, _ = trace_of(plan)
    some, _ = trace_of(plan, hooks=["score", "evict"], layers=[1])
    wanted = [one for one in everything.calls if one.hook in ("score", "evict") and one.layer == 1]
    assert [(one.hook, one.layer, one.requests, one.tokens) for one in some.calls] == [
        (one.hook, one.layer, one.requests, one.tokens) for one in wanted
    ]
    assert some.num_calls == len(wanted) > 0


def test_last_limits_kept_calls_but_not_on_call() -> None:
    passed_on: list[HookCall] = []
    trace, _ = trace_of(Plan.uniform("h2o", budget=14, buffer=4), last=3, on_call=passed_on.append)
    assert len(trace.calls) == 3
    assert list(trace.calls) == passed_on[-3:]
    assert trace.num_calls == len(passed_on) == sum(one.calls for one in trace.totals())


@attrs.define(eq=False)
class RecordsEvictions:
    """Records the evicted rows, independently of the trace."""

    left: list[tuple[int, int, tuple[int, ...]]] = attrs.field(factory=list)

    @hookimpl(wrapper=True)
    def select(
        self, layer_idx: int, positions: Tensor, memory: Memory
    ) -> Generator[None, Tensor, Tensor]:
        keep = yield
        for b in range(len(memory.sequences)):
            for head in range(positions.shape[1]):
                kept_positions = set(positions[b, head][keep[b, head]].tolist())
                evicted = [p for p in positions[b, head].tolist() if p not in kept_positions]
                self.left.append((layer_idx, head, tuple(evicted)))
        return keep


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """As of Llama: the first word of a text has no space before it."""
    tokenizer = Tokenizer(WordLevel({f"▁w{i}": i for i in range(61)}, unk_token="▁w0"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("make_tokenizer", [tiny_tokenizer, spaced_tokenizer])
def test_evicted_rows_are_recorded_with_their_text(make_tokenizer: Callable[[], Any]) -> None:
    policy, tokenizer = RecordsEvictions(), make_tokenizer()
    plan = Plan.uniform("h2o", policy, budget=10, buffer=4)
    trace, results = trace_of(plan, tokenizer, hooks=["select"], kept=True)
    found = []
    for call in trace.calls:
        for left in call.left:
            ids = [*PROMPTS[left.request], *results[left.request].tokens]
            for (first, last), text in zip(left.ranges, left.texts, strict=True):
                before = tokenizer.decode(ids[:first])
                assert before + text == tokenizer.decode(ids[: last + 1])
            evicted = tuple(p for first, last in left.ranges for p in range(first, last + 1))
            assert left.num_rows == len(evicted)
            found += [(call.layer, head, evicted) for head in left.heads]
    assert sorted(found) == sorted(policy.left)
    assert found


def test_calls_serialize_to_json() -> None:
    trace, _ = trace_of(Plan.uniform("rkv", "protect", budget=14, buffer=4), kept=True)
    for call in trace.calls:
        again = json.loads(json.dumps(call.to_dict()))
        assert again["hook"] == call.hook


@pytest.mark.parametrize(
    ("options", "message"),
    [({"hooks": ["scroe"]}, "scroe"), ({"layers": [0, 2]}, "layer 2")],
)
def test_unknown_hooks_and_layers_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        trace_of(Plan.uniform("full"), **options)


def test_second_recording_of_an_engine_raises() -> None:
    engine = Engine(MODEL, plan=Plan.uniform("full"))
    first = recording(engine)
    with first, pytest.raises(KVPolicyError), recording(engine):
        pass
    with recording(engine) as trace:
        engine.generate([[1]], max_new_tokens=2).results()
    assert trace.num_calls == 1


@attrs.define(eq=False)
class CallsPartFirst:
    """A wrapper that calls its part before the wrapped policies."""

    parts: Any

    @hookimpl(wrapper=True)
    def score(self, parts: Parts) -> Generator[None, Tensor, Tensor]:
        (mine,) = parts.of(self)
        answer = yield
        return answer + mine


def test_wrapped_calls_after_a_part_call_are_recorded() -> None:
    plan = Plan.uniform("h2o", CallsPartFirst([("knorm", PolicySpec("knorm").build())]), budget=8)
    trace, _ = trace_of(attrs.evolve(plan, buffer=4), hooks=["score"])
    found = {tuple(part.policy for part in call.parts) for call in trace.calls}
    assert found == {("knorm",), ("calls_part_first", "h2o")}
    assert {call.answered_by for call in trace.calls} == {"knorm", "h2o+calls_part_first"}
