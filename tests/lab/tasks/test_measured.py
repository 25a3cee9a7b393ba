"""Perplexity and agreement: against plain forwards, against free-running texts, in any order."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab_samples import CELLS, sample
from shared_work import Watched
from tiny import r1_tokenizer, shared_model, tiny_model, tiny_tokenizer
from tokenizer_kinds import KINDS

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.errors import TaskError
from kvpolicy.lab.shared import Shared
from kvpolicy.lab.tasks.likelihood import (
    FIRST_DIFFERENCE,
    KL,
    LOSS,
    MATCH,
    NUM_SCORED,
    Agreement,
    Perplexity,
)
from kvpolicy.lab.tasks.retention import Retention
from kvpolicy.lab.tasks.task import EvalOutcome, EvalRequest, Example, Graded, Metric, load_task
from kvpolicy.model.static_forward import Compiled
from kvpolicy.state import WaitingRequest

TOKENIZER = tiny_tokenizer()
# A loss is a sum over tokens; one forward and many round differently.
ROUNDING = 1e-3

MEASURES: tuple[Metric, ...] = (Perplexity(), Agreement(), Retention())

texts = st.text("abcdefgh ", min_size=2, max_size=40)


@attrs.define(eq=False)
class LastFirst:
    """Requests in the opposite order, one at a time."""

    @hookimpl
    def schedule(self, waiting: list[WaitingRequest]) -> list[list[int]]:
        return [[waiting[-1].id]]


def measured(
    measure: Metric,
    plan: Plan,
    items: Sequence[Example],
    *,
    slots: int = 3,
    max_new_tokens: int = 60,
    model: Any = None,
    tokenizer: Any = TOKENIZER,
    shared: Shared | None = None,
) -> list[EvalOutcome]:
    engine = Engine(model or shared_model(), tokenizer, plan, slots=slots)
    asked = [EvalRequest(item, Request(item.prompt, max_new_tokens, Sampling())) for item in items]
    trial = measure.begin(engine, asked, shared or Shared())
    found = {result.id: trial.outcome(result) for result in trial.run}
    return [found[number] for number in range(len(items))]


def text(prompt: str, reference: str, index: int = 0) -> Example:
    return Example(index, prompt, "", reference=reference)


def loss_by_hand(
    prompt: str, reference: str, model: Any = None, tokenizer: Any = TOKENIZER
) -> float:
    """One forward of the unmodified model over the whole text."""
    ids = tokenizer(prompt + reference)["input_ids"]
    first = max(len(tokenizer(prompt)["input_ids"]), 1) if prompt else 1
    with torch.inference_mode():
        logits = (model or shared_model())(torch.tensor([ids])).logits[0].double()
    loss = 0.0
    for place in range(first, len(ids)):
        row = logits[place - 1]
        loss -= float(row[ids[place]]) - math.log(float(row.exp().sum()))
    return loss


@given(st.one_of(st.just(""), texts), texts)
def test_without_evictions_the_loss_equals_that_of_one_forward(prompt: str, reference: str) -> None:
    (found,) = measured(Perplexity(), Plan.uniform("full"), [text(prompt, reference)])
    assert found.values[LOSS] == pytest.approx(loss_by_hand(prompt, reference), abs=ROUNDING)
    assert found.values[NUM_SCORED] == len(reference) - (not prompt)
    assert found.result.finish_reason == "stop"
    assert found.correct is None


@pytest.mark.parametrize(("prompt", "reference"), [("일본 日本", "日本 ab."), ("one", " two 🦄")])
def test_the_text_is_scored_without_a_space_of_the_tokenizer(prompt: str, reference: str) -> None:
    tokenizer = KINDS["Llama"]()
    model = tiny_model(num_layers=1, vocab=len(tokenizer))
    given, whole = tokenizer(prompt)["input_ids"], tokenizer(prompt + reference)["input_ids"]
    assert whole[: len(given)] == given
    (found,) = measured(
        Perplexity(),
        Plan.uniform("full"),
        [text(prompt, reference)],
        model=model,
        tokenizer=tokenizer,
    )
    assert found.values[NUM_SCORED] == len(whole) - len(given)
    by_hand = loss_by_hand(prompt, reference, model, tokenizer)
    assert found.values[LOSS] == pytest.approx(by_hand, abs=ROUNDING)


def test_evicting_changes_the_loss_and_only_after_the_first_compaction() -> None:
    plan = Plan.uniform("streaming", budget=8, buffer=4)
    long, short = text("abc", "defgh abcdefgh hgfedcba"), text("abc", "defgh abc")
    evicted = measured(Perplexity(), plan, [long, short])
    full = measured(Perplexity(), Plan.uniform("full"), [long, short])
    assert evicted[0].result.compactions > 0
    assert abs(evicted[0].values[LOSS] - full[0].values[LOSS]) > ROUNDING
    assert evicted[1].result.compactions == 0
    assert evicted[1].values[LOSS] == pytest.approx(full[1].values[LOSS], abs=ROUNDING)


@pytest.mark.parametrize("measure", MEASURES, ids=lambda one: one.name)
def test_a_text_with_logits_that_are_not_finite_fails_alone(measure: Metric) -> None:
    model = tiny_model()
    (token,) = TOKENIZER("q")["input_ids"]
    model.model.embed_tokens.weight.data[token] = torch.nan
    plan, valid = Plan.uniform("streaming", budget=8, buffer=4), text("abc", "defgh abcd", 1)
    first, second = measured(
        measure, plan, [text("aq", "bc"), valid], max_new_tokens=9, model=model
    )
    assert "hold NaN or infinity" in str(first.result.error)
    (alone,) = measured(measure, plan, [valid], max_new_tokens=9)
    assert second.values == pytest.approx(alone.values, abs=ROUNDING)


MIXED = [text("abc", "defgh abcdefgh hgfedcba", 0), text("a", "hgfe", 1), text("", "bcd dcb", 2)]


@pytest.mark.few(1)
@pytest.mark.parametrize("measure", MEASURES, ids=lambda one: one.name)
@pytest.mark.parametrize("order", [(), (LastFirst(),)], ids=["as they come", "last first"])
def test_a_text_is_measured_alike_alone_and_among_others(
    measure: Metric, order: tuple[object, ...]
) -> None:
    items = [attrs.evolve(item, prompt=item.prompt or "b") for item in MIXED]
    plan = Plan.uniform("h2o", budget=8, buffer=4, knobs={"h2o": {"n_recent": 4}}, schedule=order)
    together = measured(measure, plan, items, slots=2)
    alone = [measured(measure, plan, [item])[0] for item in items]
    for one, other in zip(together, alone, strict=True):
        assert one.result.tokens == other.result.tokens
        assert dict(one.values) == pytest.approx(dict(other.values), abs=ROUNDING)


def test_a_truncated_text_is_counted_as_truncated() -> None:
    (found,) = measured(
        Perplexity(), Plan.uniform("full"), [text("a", "bcdefgh")], max_new_tokens=3
    )
    assert found.values[NUM_SCORED] == 3
    assert found.result.finish_reason == "length"


def test_a_stop_token_in_the_middle_of_a_text_is_scored_like_any_other() -> None:
    model = shared_model(seed=3)
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = TOKENIZER("c")["input_ids"][0]
    try:
        (found,) = measured(Perplexity(), Plan.uniform("full"), [text("a", "bcd")], model=model)
    finally:
        model.generation_config.eos_token_id = before
    assert found.values[NUM_SCORED] == 3
    assert found.result.finish_reason == "stop"


def test_a_text_of_one_token_is_refused() -> None:
    with pytest.raises(TaskError, match="text 0"):
        measured(Perplexity(), Plan.uniform("full"), [text("", "a")])


@pytest.mark.slow
def test_a_request_that_fails_is_kept_and_has_no_value() -> None:
    items = [text("a" * 600, "b"), text("a", "b", 1)]
    for measure in MEASURES:
        failed, fine = measured(measure, Plan.uniform("full"), items)
        assert failed.result.finish_reason == "error"
        assert not failed.values
        assert fine.values


def test_a_request_that_fails_is_incorrect_and_not_graded() -> None:
    items = [text("a" * 600, "b"), text("a", "b", 1)]
    failed, fine = measured(Graded(lambda _text, _item: True), Plan.uniform("full"), items)
    assert failed.result.finish_reason == "error"
    assert failed.correct is False
    assert fine.correct is True


def test_special_tokens_are_not_scored_after_a_prompt() -> None:
    engine = Engine(tiny_model(vocab=300), r1_tokenizer(), Plan.uniform("full"))
    item = text("abc", "defg")
    trial = Perplexity().begin(
        engine, [EvalRequest(item, Request("abc", 60, Sampling()))], Shared()
    )
    (found,) = [trial.outcome(result) for result in trial.run]
    assert found.values[NUM_SCORED] == 4
    assert (
        list(found.result.tokens) == r1_tokenizer()("defg", add_special_tokens=False)["input_ids"]
    )


def test_perplexity_and_its_interval_are_exponentials() -> None:
    nll, perplexity = Perplexity().columns
    samples = [
        sample(CELLS[0], i, values={LOSS: loss, NUM_SCORED: 4.0})
        for i, loss in enumerate((2.0, 8.0, 3.0))
    ]
    ours, theirs = perplexity.estimate(samples), nll.estimate(samples)
    assert ours is not None
    assert theirs is not None
    assert [math.log(x) for x in attrs.astuple(ours)] == pytest.approx(attrs.astuple(theirs))
    assert theirs.low < theirs.value == 13 / 12 < theirs.high
    assert perplexity.value(samples[0]) == pytest.approx(math.exp(0.5))


def test_the_full_cache_agrees_with_itself() -> None:
    found = measured(Agreement(), Plan.uniform("full"), MIXED[:2])
    for one in found:
        assert one.values[MATCH] == 1
        assert one.values[KL] == pytest.approx(0, abs=1e-6)
        assert one.values[FIRST_DIFFERENCE] == len(one.result.tokens) == 60


def test_plans_that_share_distributions_of_the_full_cache_have_the_numbers_of_each_alone() -> None:
    plans = [Plan.uniform("streaming", budget=6, buffer=2), Plan.uniform("full")]

    def numbers(plan: Plan, shared: Shared) -> list[Any]:
        options: dict[str, Any] = {"slots": 2, "max_new_tokens": 12, "shared": shared}
        found = measured(Agreement(), plan, MIXED[:3], **options)
        return [(one.result.tokens, one.values) for one in found]

    alone = [numbers(plan, Shared()) for plan in plans]
    assert alone[0] != alone[1]
    vocabulary = shared_model().config.vocab_size
    for most, num_made in ((1e9, 1), (20 * 4 * vocabulary, 2), (0, 2)):
        shared = Watched(most)
        assert [numbers(plan, shared) for plan in plans] == alone
        assert shared.num_made == num_made


@pytest.mark.nightly
def test_the_full_cache_is_compiled_where_the_plan_is(
    monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> None:
    engine = Engine(shared_model(), TOKENIZER, Plan.uniform("full"), slots=2, compile=True)
    asked = [EvalRequest(item, Request(item.prompt, 30)) for item in MIXED[:2]]
    trial = Agreement().begin(engine, asked, Shared())
    compiled, steps = Compiled.__call__, set()

    def spy(self: Compiled, call: Callable[..., Any], given: Any) -> Any:
        steps.add(given.step)
        return compiled(self, call, given)

    monkeypatch.setattr(Compiled, "__call__", spy)
    for result in trial.run:
        assert trial.outcome(result).values[MATCH] == 1
    assert len(steps) == 2, "one for each engine"
    assert trial.run.report.compile_s + trial.run.report.decode_s < trial.run.report.elapsed_s


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_the_first_difference_equals_that_of_free_generation(policy: str) -> None:
    knobs = {"h2o": {"n_recent": 4}} if policy == "h2o" else {}
    plan = Plan.uniform(policy, budget=10, buffer=6, knobs=knobs)
    prompts = ["abcdefgh", "hello there", "aa", "dcba abcd abcd"]
    items = [Example(i, prompt, "") for i, prompt in enumerate(prompts)]
    found = measured(Agreement(), plan, items)
    actual = {}
    for name, one in (("full", Plan.uniform("full")), ("plan", plan)):
        engine = Engine(shared_model(), TOKENIZER, one)
        actual[name] = engine.generate(prompts, max_new_tokens=60).results()
    parted = 0
    for outcome, full, ours in zip(found, actual["full"], actual["plan"], strict=True):
        assert outcome.result.tokens == full.tokens, "led along the full cache's answer"
        pairs = zip(full.tokens, ours.tokens, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(full.tokens))
        assert outcome.values[FIRST_DIFFERENCE] == same
        assert outcome.values[MATCH] <= 1
        parted += same < len(full.tokens)
    assert parted, "else nothing was tested"


def test_the_divergence_is_the_mean_over_single_distributions() -> None:
    """Two runs led by hand along one text, their logits written down and summed in loops."""
    from kvpolicy.engine.engine import Run

    plan = Plan.uniform("streaming", budget=8, buffer=4)
    item = Example(0, "abcdefgh", "")
    (found,) = measured(Agreement(), plan, [item], max_new_tokens=20)
    written: list[list[list[float]]] = []
    for one in (Plan.uniform("full"), plan):
        rows: list[list[float]] = []

        def draw(_: object, logits: torch.Tensor, rows: list[list[float]] = rows) -> torch.Tensor:
            rows.append(logits[0].double().tolist())
            return torch.tensor([found.result.tokens[len(rows) - 1]])

        list(Run(Engine(shared_model(), TOKENIZER, one), [Request(item.prompt, 20)], draw))
        written.append(rows)
    total = 0.0
    for full, ours in zip(*written, strict=True):
        z_full, z_ours = (math.log(sum(math.exp(x) for x in row)) for row in (full, ours))
        for a, b in zip(full, ours, strict=True):
            total += math.exp(a - z_full) * ((a - z_full) - (b - z_ours))
    assert found.values[KL] == pytest.approx(total / 20, abs=ROUNDING)
    assert found.values[KL] > ROUNDING


@pytest.mark.needs_reasoner
def test_a_task_without_references_has_no_perplexity() -> None:
    with pytest.raises(TaskError, match="reasoner-needle"):
        load_task("perplexity:of=reasoner-needle").examples(1, seed=0)


def test_a_text_drawn_by_two_seeds_is_pooled_as_one() -> None:
    once = [
        sample(CELLS[0], i, values={LOSS: loss, NUM_SCORED: 10.0})
        for i, loss in ((0, 5.0), (1, 9.0))
    ]
    twice = [*once, *(attrs.evolve(one, key=f"again {one.key}", seed=1) for one in once)]
    for column in Perplexity().columns:
        found, plain = column.estimate(twice), column.estimate(once)
        assert found is not None
        assert plain is not None
        assert attrs.astuple(found) == pytest.approx(attrs.astuple(plain))
