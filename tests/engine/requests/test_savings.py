"""What reports say is saved is the difference to a full cache; nothing evicted is said."""

from typing import Any

import pytest
import torch
from families import family_model
from hypothesis import given
from hypothesis import strategies as st
from tiny import shared_model

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.compat import cache_argument
from kvpolicy.engine.requests.results import RunReport
from kvpolicy.engine.requests.savings import nothing_evicted

PROMPTS = [[1, 2, 3] * 4, [4, 5] * 9, [6, 7, 8]]
EVICTS = Plan.uniform("streaming", budget=12, buffer=4)


def served(model: Any, plan: Plan, prompts: list[list[int]] = PROMPTS) -> Any:
    run = Engine(model, plan=plan, slots=2).generate(prompts, max_new_tokens=24, stop_ids=())
    return run.results(), run.report


@pytest.fixture(scope="module", params=["all layers alike", "sliding windows"])
def model(request: pytest.FixtureRequest) -> Any:
    return shared_model() if request.param == "all layers alike" else family_model("gpt_oss")


@pytest.mark.few(1)
def test_a_full_cache_saves_nothing_and_has_nothing_to_say(model: Any) -> None:
    results, report = served(model, Plan.uniform("full"))
    assert all(result.full_bytes == result.peak_bytes > 0 for result in results)
    assert (report.saved_share, report.note) == (0, None)


@pytest.mark.slow
@pytest.mark.few(1)
def test_the_share_saved_refers_to_a_full_cache_of_the_same_tokens(model: Any) -> None:
    full, _ = served(model, Plan.uniform("full"))
    results, report = served(model, EVICTS)
    assert [result.full_bytes for result in results] == [result.peak_bytes for result in full]
    for result in results:
        assert result.saved_share == 1 - result.peak_bytes / result.full_bytes
    assert report.held_bytes == sum(result.peak_bytes for result in results)
    assert report.full_bytes == sum(result.full_bytes for result in results)
    assert 0 < report.saved_share == 1 - report.held_bytes / report.full_bytes
    assert report.to_dict()["saved_share"] == report.saved_share


@pytest.mark.parametrize(
    ("num_tokens", "entries", "is_told"),
    [(16, {}, False), (17, {}, True), (17, {"prompt": "keep"}, False)],
)
def test_rows_that_leave_before_the_end_of_a_prompt_is_read_are_told(
    num_tokens: int, entries: dict[str, Any], is_told: bool
) -> None:
    plan = Plan.from_dict({"stack": ["streaming"], "budget": 12, "buffer": 4, **entries})
    engine = Engine(shared_model(), plan=plan)
    run = engine.generate([[1, 2, 3], [4] * num_tokens], max_new_tokens=20, stop_ids=())
    assert [result.rows_evicted > 0 for result in run.results()] == [True, True]
    assert (run.report.note is not None) == is_told


@pytest.mark.few(1)
def test_a_policy_cache_reports_the_same_as_the_engine(model: Any) -> None:
    (result,), _ = served(model, EVICTS, PROMPTS[:1])
    cache = PolicyCache(model, EVICTS)
    ids = torch.tensor(PROMPTS[:1])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids, **cache_argument(cache), max_new_tokens=24, **options)
    report = cache.report
    assert (report.held_bytes, report.full_bytes) == (result.peak_bytes, result.full_bytes)
    assert report.saved_share == result.saved_share > 0
    assert report.note is None
    cache = PolicyCache(model, Plan.uniform("streaming", budget=64))
    model.generate(ids, **cache_argument(cache), max_new_tokens=24, **options)
    assert "nothing was evicted: the longest sequence had 35 rows" in str(cache.report.note)


def test_a_run_that_evicts_nothing_says_so_and_what_to_try() -> None:
    _, report = served(shared_model(), Plan.uniform("streaming", budget=64, buffer=128))
    assert report.note == (
        "nothing was evicted: the longest sequence had 41 rows, and budget and buffer are "
        "64 + 128; try budget=20 buffer=20"
    )
    again = Plan.uniform("streaming", budget=20, buffer=20)
    _, report = served(shared_model(), again)
    assert report.note is None
    assert report.rows_evicted > 0


@given(st.integers(1, 300), st.integers(0, 12), st.integers(1, 300), st.integers(1, 300))
def test_what_is_suggested_evicts(longest: int, n_sink: int, budget: int, buffer: int) -> None:
    knobs = {"streaming": {"n_sink": n_sink}}

    def plan(budget: int, buffer: int) -> Any:
        budget = max(budget, n_sink + 1)
        return Plan.uniform("streaming", budget=budget, buffer=buffer, knobs=knobs).resolve(2)

    given_plan = plan(budget, buffer)
    note = nothing_evicted(given_plan, 0, longest)
    assert note is not None
    _, _, hint = note.partition("; try ")
    if not hint:
        assert longest <= 2 * max(n_sink + 1, 1), "the policy protects too much, or too few rows"
        return
    tried = {key: int(value) for key, _, value in (word.partition("=") for word in hint.split())}
    suggested = plan(tried["budget"], tried.get("buffer", buffer))
    assert suggested.layers[0].budget == tried["budget"]
    assert suggested.layers[0].capacity(longest) < longest


@pytest.mark.parametrize(
    ("plan", "evicted", "longest"),
    [
        (Plan.uniform("full"), 0, 99),
        (EVICTS, 8, 99),
        (EVICTS, 0, 0),
    ],
    ids=["never evicts", "has evicted", "no sequence"],
)
def test_there_is_nothing_to_say(plan: Plan, evicted: int, longest: int) -> None:
    assert nothing_evicted(plan.resolve(2), evicted, longest) is None


def test_a_plan_of_several_budgets_gets_no_number_to_try() -> None:
    layers = [{"where": "0:1", "budget": 50}, {"where": "1:", "budget": 70}]
    plan = Plan.from_dict({"stack": ["streaming"], "layers": layers}).resolve(3)
    note = nothing_evicted(plan, 0, 60)
    assert note is not None
    assert note.endswith("budget and buffer are 50 + 32 to 70 + 32")


def test_a_report_before_the_first_step_saves_nothing() -> None:
    assert RunReport().saved_share == 0
