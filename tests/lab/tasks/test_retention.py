"""Retention: against loops over the weights of an eager forward."""

from typing import Any

import pytest
from hybrids import hybrid_model
from hypothesis import given
from hypothesis import strategies as st
from reference_attention import retention_by_hand
from shared_work import Watched
from tiny import shared_model, tiny_model, tiny_tokenizer
from transformers import DynamicCache

from kvpolicy import Engine, Plan
from kvpolicy.compat import has_states
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.engine.tracing import recording
from kvpolicy.lab.shared import Shared
from kvpolicy.lab.tasks import held_shares as source
from kvpolicy.lab.tasks.held_shares import ERROR, LOOK_BACKS, LOOK_BACKS_HELD, RETAINED, LookBack
from kvpolicy.lab.tasks.likelihood import MATCH, Agreement
from kvpolicy.lab.tasks.retention import Retention, retention
from kvpolicy.lab.tasks.task import EvalOutcome, EvalRequest, Example, load_task

TOKENIZER = tiny_tokenizer()
ROUNDING = 1e-4
PROMPTS = ["abcdefgh", "hello there, you", "aa", "dcba abcd abcd"]

H2O = {"h2o": {"n_recent": 4}}
PLANS = {
    "streaming": Plan.uniform("streaming", budget=8, buffer=4),
    "h2o": Plan.uniform("h2o", budget=9, buffer=5, knobs=H2O),
    "heads share": Plan.uniform("h2o", budget=9, buffer=5, knobs=H2O, heads="shared"),
    "prompts stay": Plan.uniform("h2o", budget=6, buffer=5, knobs=H2O, prompt="keep"),
    "one layer": Plan.from_dict(
        {
            "buffer": 4,
            "layers": [
                {"where": [0], "stack": ["full"]},
                {"where": [1], "stack": ["streaming"], "budget": 12},
            ],
        }
    ),
}


# Small enough for sequences of a tiny model.
LOOK_BACK = LookBack(weight=0.08, distance=5)
METRIC = Retention(LOOK_BACK)


def measured(
    plan: Plan,
    prompts: list[str],
    *,
    model: Any = None,
    shared: Shared | None = None,
    **options: Any,
) -> Any:
    engine = Engine(model or shared_model(), TOKENIZER, plan, slots=options.pop("slots", 2))
    num = options.pop("max_new_tokens", 30)
    asked = [
        EvalRequest(Example(i, prompt, ""), Request(prompt, num, Sampling(temperature=1.0)))
        for i, prompt in enumerate(prompts)
    ]
    trial = METRIC.begin(engine, asked, shared or Shared())
    found: dict[int, EvalOutcome] = {one.id: trial.outcome(one) for one in trial.run}
    return [found[number] for number in range(len(prompts))]


def parts_of(found: EvalOutcome, facet: str) -> dict[int | str, dict[str, float]]:
    breakdown = found.breakdowns[facet]
    return {part: breakdown.values_of(i) for i, part in enumerate(breakdown.parts)}


def check(
    found: EvalOutcome, plan: Plan, model: Any, eager: Any, prompt: str, cache: Any = None
) -> None:
    """Compare an outcome and its parts with loops."""
    gone, first = rows_gone(plan, model, prompt, found.result.tokens)
    ids = TOKENIZER(prompt)["input_ids"]
    tallies = retention_by_hand(
        eager,
        ids,
        found.result.tokens,
        gone,
        first,
        weight=LOOK_BACK.weight,
        distance=LOOK_BACK.distance,
        cache=cache,
    )
    values = dict(found.values)
    assert 0 <= values.pop(MATCH) <= 1
    assert values == pytest.approx(tallies[()].values(), abs=ROUNDING)
    assert found.values[LOOK_BACKS] > found.values.get(LOOK_BACKS_HELD, 0) > 0
    by_layer, by_head, by_distance = (
        {place[1:]: tally for place, tally in tallies.items() if place[:1] == (facet,)}
        for facet in ("layer", "head", "distance")
    )
    assert parts_of(found, "layer") == {
        layer: pytest.approx(one.values(), abs=ROUNDING) for (layer,), one in by_layer.items()
    }
    assert parts_of(found, "head") == {
        f"L{layer}H{head}": pytest.approx(one.values(), abs=ROUNDING)
        for (layer, head), one in by_head.items()
    }
    whole = sum(one.all for one in by_distance.values())
    assert parts_of(found, "attention_distance") == {
        least: pytest.approx(
            {k: v for k, v in one.values().items() if k != ERROR} | {"attention": one.all / whole},
            abs=ROUNDING,
        )
        for (least,), one in by_distance.items()
    }


def rows_gone(
    plan: Plan, model: Any, prompt: str, tokens: tuple[int, ...]
) -> tuple[dict[tuple[int, int, int], int], int]:
    """When each row leaves an engine that is led along some tokens, as its trace tells."""
    from kvpolicy.engine.engine import Run
    from kvpolicy.engine.sampler import teacher_forced

    engine = Engine(model, TOKENIZER, plan)
    gone: dict[tuple[int, int, int], int] = {}
    with recording(engine, hooks=["select"], kept=True) as trace:
        run = Run(
            engine,
            [Request(prompt, len(tokens))],
            lambda seqs, logits: teacher_forced([tokens[len(seqs[0].tokens)]], logits),
        )
        (result,) = run
    first = 10**9
    for call in trace.calls:
        # The newest token is not brought in yet: the query at its position is the next one.
        query = result.prompt_len + call.tokens[0] - 1
        assert call.layer is not None
        first = min(first, query)
        for left in call.left:
            for head in left.heads:
                for begin, end in left.ranges:
                    for row in range(begin, end + 1):
                        assert gone.setdefault((call.layer, head, row), query) == query
    return gone, first


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", PLANS)
def test_values_equal_loops_over_the_weights_of_an_eager_forward(name: str, family: str) -> None:
    plan, model = PLANS[name], shared_model(family)
    eager = tiny_model(family, attn_implementation="eager")
    for prompt, found in zip(PROMPTS, measured(plan, PROMPTS, model=model), strict=True):
        check(found, plan, model, eager, prompt)
        assert found.values[ERROR] > 0.01
        assert found.values[RETAINED] < 0.999


@pytest.mark.parametrize("name", ["streaming", "h2o"])
def test_layers_with_a_sliding_window_are_compared_within_it(name: str) -> None:
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16}
    options["layer_types"] = ["sliding_attention", "full_attention"]
    model = tiny_model("qwen2", **options)
    eager = tiny_model("qwen2", attn_implementation="eager", **options)
    for prompt, found in zip(PROMPTS, measured(PLANS[name], PROMPTS, model=model), strict=True):
        check(found, PLANS[name], model, eager, prompt)
    long = "abcdefgh " * 4
    for plan in (PLANS[name], Plan.uniform("full")):
        (found,) = measured(plan, [long], model=model, max_new_tokens=13)
        if plan is PLANS[name]:
            check(found, plan, model, eager, long)
        else:
            assert (found.values[ERROR], found.values[RETAINED]) == (0.0, 1.0)


@pytest.mark.skipif(not has_states(), reason="transformers has no cache for states")
def test_layers_without_attention_have_no_part() -> None:
    model = hybrid_model("lfm2")
    (found,) = measured(PLANS["h2o"], PROMPTS[1:2], model=model)
    cache = DynamicCache(config=model.config)
    check(found, PLANS["h2o"], model, model, PROMPTS[1], cache)
    assert [*parts_of(found, "layer")] == [1, 3]


def test_queries_of_eager_decode_steps_are_those_of_their_own_tokens() -> None:
    options: dict[str, Any] = {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    }
    model = tiny_model(**options)
    assert Engine(model, TOKENIZER, PLANS["h2o"]).eager_reason
    eager = tiny_model(attn_implementation="eager", **options)
    (found,) = measured(PLANS["h2o"], PROMPTS[:1], model=model)
    check(found, PLANS["h2o"], model, eager, PROMPTS[0])


def numbers_of(found: list[EvalOutcome]) -> list[Any]:
    return [(one.result.tokens, one.values, one.breakdowns) for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full attention", "sliding window"])
def test_plans_that_share_the_run_of_the_full_cache_have_the_numbers_of_each_alone(
    kind: str,
) -> None:
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16}
    options["layer_types"] = ["sliding_attention", "full_attention"]
    model = tiny_model("qwen2", **options) if kind == "sliding window" else shared_model()
    plans = [PLANS["h2o"], Plan.uniform("full"), PLANS["one layer"]]
    alone = [numbers_of(measured(plan, PROMPTS, model=model)) for plan in plans]
    for most, num_made in ((1e9, 1), (20_000.0, 3)):  # 20 kB: more than one of the four
        shared = Watched(most)
        found = [numbers_of(measured(one, PROMPTS, model=model, shared=shared)) for one in plans]
        assert found == alone
        assert shared.num_made == num_made


def test_other_requests_and_other_numbers_of_slots_have_a_run_of_their_own() -> None:
    shared, plan = Watched(), PLANS["streaming"]
    for prompts, options in (
        (PROMPTS[2:], {}),
        (PROMPTS[2:], {"slots": 1}),
        (PROMPTS[2:], {"max_new_tokens": 7}),
        (PROMPTS[:1], {}),
        (PROMPTS[2:], {}),
    ):
        options = {"max_new_tokens": 12} | options
        alone = numbers_of(measured(plan, prompts, **options))
        assert numbers_of(measured(plan, prompts, shared=shared, **options)) == alone
    assert shared.num_made == 4


def test_a_run_that_nobody_followed_to_its_end_is_not_shared() -> None:
    shared, plan = Watched(), PLANS["streaming"]
    engine = Engine(shared_model(), TOKENIZER, plan, slots=2)
    asked = [EvalRequest(Example(i, one, ""), Request(one, 30)) for i, one in enumerate(PROMPTS)]
    trial = METRIC.begin(engine, asked, shared)
    for _ in range(5):
        trial.run.step()
    assert numbers_of(measured(plan, PROMPTS, shared=shared)) == numbers_of(measured(plan, PROMPTS))
    assert shared.num_made == 2


def test_the_answer_is_that_of_the_full_cache() -> None:
    found = measured(PLANS["streaming"], PROMPTS)
    full = Engine(shared_model(), TOKENIZER, Plan.uniform("full"))
    expected = full.generate(PROMPTS, max_new_tokens=30).results()
    assert [one.result.tokens for one in found] == [one.tokens for one in expected]


@pytest.mark.nightly
@given(st.lists(st.text("abcdefgh ", min_size=1, max_size=30), min_size=1, max_size=4))
def test_where_nothing_is_evicted_all_is_retained(prompts: list[str]) -> None:
    for plan in (Plan.uniform("full"), Plan.uniform("streaming", budget=64)):
        for one in measured(plan, prompts, max_new_tokens=12):
            check_all_is_retained(one.values)
            for facet in METRIC.facets:
                for values in parts_of(one, facet).values():
                    check_all_is_retained({ERROR: 0.0} | values)


def check_all_is_retained(values: dict[str, float]) -> None:
    assert (values[ERROR], values[RETAINED], values.get(LOOK_BACKS_HELD, 1.0)) == (0.0, 1.0, 1.0)


@pytest.mark.nightly
@given(st.text("abcdefgh ", min_size=1, max_size=30), st.integers(1, 20), st.integers(1, 20))
def test_a_policy_that_only_adds_rows_retains_more_attention(
    prompt: str, budget: int, more: int
) -> None:
    """Of streaming, the rows of a smaller budget are among those of a larger one at every step.

    So this holds of attention and look-backs, step by step; but values are means from the first
    compaction on, which a larger budget has later: here at the end of the prompt.
    """
    prompt = prompt + "hgfedcba " * 6
    plans = [Plan.uniform("streaming", budget=5 + n, buffer=1) for n in (budget, budget + more)]
    less, most = (measured(plan, [prompt], max_new_tokens=8)[0].values for plan in plans)
    assert less[LOOK_BACKS] == most[LOOK_BACKS]
    assert less[RETAINED] <= most[RETAINED] + 1e-6
    assert less.get(LOOK_BACKS_HELD, 1) <= most.get(LOOK_BACKS_HELD, 1)


def test_steps_before_the_first_compaction_do_not_count() -> None:
    plan, prompt = Plan.uniform("streaming", budget=8, buffer=22), "abcdefgh"
    (late,) = measured(plan, [prompt], max_new_tokens=25)
    (later,) = measured(plan, [prompt], max_new_tokens=24)
    gone, first = rows_gone(plan, shared_model(), prompt, late.result.tokens)
    assert first == 30
    assert {row for _, _, row in gone} == set(range(4, 26))
    check(late, plan, shared_model(), tiny_model(attn_implementation="eager"), prompt)
    assert later.values[ERROR] != late.values[ERROR]


@pytest.mark.slow
def test_blocks_of_queries_give_what_all_at_once_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(PLANS["h2o"], PROMPTS)
    monkeypatch.setattr(source, "_BLOCK_BYTES", 2000)
    for one, other in zip(whole, measured(PLANS["h2o"], PROMPTS), strict=True):
        assert one.values == pytest.approx(other.values, abs=1e-6)


def test_an_answer_of_one_token_has_no_value() -> None:
    (found,) = measured(PLANS["h2o"], PROMPTS[:1], max_new_tokens=1)
    assert not found.values
    assert found.result.finish_reason == "length"


def test_tokens_that_match_are_those_of_agreement() -> None:
    plan = PLANS["streaming"]
    engine = Engine(shared_model(), TOKENIZER, plan, slots=2)
    asked = [EvalRequest(Example(i, one, ""), Request(one, 30)) for i, one in enumerate(PROMPTS)]
    trial = Agreement().begin(engine, asked, Shared())
    agreeing = {one.id: trial.outcome(one).values[MATCH] for one in trial.run}
    assert [one.values[MATCH] for one in measured(plan, PROMPTS)] == [
        pytest.approx(agreeing[i]) for i in range(len(PROMPTS))
    ]


@pytest.mark.needs_reasoner
def test_the_task_is_found_by_its_name() -> None:
    task = load_task("retention:of=reasoner-needle")
    assert task.name == "retention:of=reasoner-needle"
    assert isinstance(task.metric, Retention)
    plain = load_task("reasoner-needle").examples(2, seed=0)
    assert list(task.examples(2, seed=0)) == list(plain)
    assert retention().name == "retention"
