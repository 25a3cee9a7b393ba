"""Retained attention and output error: against loops over the weights of an eager forward."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_attention import held_attention
from tiny import shared_model, tiny_model, tiny_tokenizer

from kvpolicy import Engine, Plan
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.engine.tracing import recording
from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks import held_attention as source
from kvpolicy.lab.tasks.attention import ERROR, RETAINED, HeldAttention, attention
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


def measured(plan: Plan, prompts: list[str], *, model: Any = None, **options: Any) -> Any:
    engine = Engine(model or shared_model(), TOKENIZER, plan, slots=options.pop("slots", 2))
    num = options.pop("max_new_tokens", 30)
    asked = [
        EvalRequest(Example(i, prompt, ""), Request(prompt, num, Sampling(temperature=1.0)))
        for i, prompt in enumerate(prompts)
    ]
    trial = HeldAttention().begin(engine, asked)
    found: dict[int, EvalOutcome] = {one.id: trial.outcome(one) for one in trial.run}
    return [found[number] for number in range(len(prompts))]


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
        gone, first = rows_gone(plan, model, prompt, found.result.tokens)
        assert gone, "else nothing is tested"
        ids = TOKENIZER(prompt)["input_ids"]
        error, share = held_attention(eager, ids, found.result.tokens, gone, first)
        assert found.values[ERROR] == pytest.approx(error, abs=ROUNDING)
        assert found.values[RETAINED] == pytest.approx(share, abs=ROUNDING)
        assert found.values[ERROR] > 0.01
        assert found.values[RETAINED] < 0.999


def test_the_answer_is_that_of_the_full_cache() -> None:
    found = measured(PLANS["streaming"], PROMPTS)
    full = Engine(shared_model(), TOKENIZER, Plan.uniform("full"))
    expected = full.generate(PROMPTS, max_new_tokens=30).results()
    assert [one.result.tokens for one in found] == [one.tokens for one in expected]


@pytest.mark.nightly
@given(st.lists(st.text("abcdefgh ", min_size=1, max_size=30), min_size=1, max_size=4))
def test_where_nothing_is_evicted_all_attention_is_retained(prompts: list[str]) -> None:
    for plan in (Plan.uniform("full"), Plan.uniform("streaming", budget=64)):
        for one in measured(plan, prompts, max_new_tokens=6):
            assert one.values == {ERROR: 0.0, RETAINED: 1.0}


def test_steps_before_the_first_compaction_do_not_count() -> None:
    plan, prompt = Plan.uniform("streaming", budget=8, buffer=22), "abcdefgh"
    (late,) = measured(plan, [prompt], max_new_tokens=25)
    (later,) = measured(plan, [prompt], max_new_tokens=24)
    gone, first = rows_gone(plan, shared_model(), prompt, late.result.tokens)
    assert first == 30
    assert {row for _, _, row in gone} == set(range(4, 26))
    eager = tiny_model(attn_implementation="eager")
    ids = TOKENIZER(prompt)["input_ids"]
    error, share = held_attention(eager, ids, late.result.tokens, gone, first)
    assert late.values == pytest.approx({ERROR: error, RETAINED: share}, abs=ROUNDING)
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


def test_a_sliding_window_that_drops_rows_is_refused() -> None:
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    with pytest.raises(TaskError, match="layer 1"):
        measured(Plan.uniform("full"), PROMPTS, model=model)
    (found,) = measured(Plan.uniform("full"), ["ab"], model=model, max_new_tokens=13)
    assert found.values == {ERROR: 0.0, RETAINED: 1.0}


@pytest.mark.needs_reasoner
def test_the_task_is_found_by_its_name() -> None:
    task = load_task("attention:of=needle")
    assert task.name == "attention:of=needle"
    assert isinstance(task.metric, HeldAttention)
    plain = load_task("needle").examples(2, seed=0)
    assert list(task.examples(2, seed=0)) == list(plain)
    with pytest.raises(TaskError, match="attention:of=TASK"):
        attention(None)
