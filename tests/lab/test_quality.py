"""The least budget that keeps a quality: the search against all budgets, a meter against tasks."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import shared_model, tiny_tokenizer

from kvpolicy import Engine, Plan
from kvpolicy.engine.engine import Run
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.sampler import teacher_forced
from kvpolicy.errors import BudgetError
from kvpolicy.lab.models import LoadedModel
from kvpolicy.lab.quality import Quality, QualityMeter, best, budgets_for, descend
from kvpolicy.lab.statistics import Interval
from kvpolicy.lab.tasks.prose import Passage

TOKENIZER = tiny_tokenizer()
TEXTS = [("abcdefgh hgfe ab", "cd abba dcba gh"), ("badcfehg abc", "def dada abcd a")]
PASSAGES = [Passage(0, parts, {}) for parts in TEXTS]


def quality(policy: str, budget: int, match: float, error: float = 0.0) -> Quality:
    plan = Plan.uniform("full")
    return Quality(policy, budget, plan, 100, Interval(match, match, match), match, None, error)


# What each policy keeps at each of three budgets, largest first; never more at a smaller one.
falling = st.lists(st.sampled_from([0.5, 0.8, 0.9, 1.0]), min_size=3, max_size=3)
kept = st.lists(falling.map(lambda found: sorted(found, reverse=True)), min_size=1, max_size=4)


@given(kept, st.sampled_from([0.6, 0.85, 1.0]), st.integers(0, 3))
def test_the_least_budget_that_is_enough_is_found(
    table: Sequence[Sequence[float]], enough: float, refusing: int
) -> None:
    budgets = [300, 200, 100]

    def measure(policy: str, budget: int) -> Quality:
        place = budgets.index(budget)
        if int(policy) == refusing and place == 2:
            raise BudgetError("it protects more rows")
        return quality(policy, budget, table[int(policy)][place], error=float(policy))

    found = list(descend(measure, [str(i) for i in range(len(table))], budgets, enough))
    passing = [
        (budget, error)
        for error, row in enumerate(table)
        for budget, match in zip(budgets, row, strict=True)
        if match >= enough and (error, budget) != (refusing, 100)
    ]
    chosen = best(found, enough, lambda one: one.budget)
    assert (chosen and (chosen.budget, chosen.output_error)) == min(passing, default=None)
    asked = [(one.policy, one.budget) for one in found]
    assert len(set(asked)) == len(asked)
    for policy, budget in asked:
        larger = budgets[: budgets.index(budget)]
        assert all(table[int(policy)][budgets.index(one)] >= enough for one in larger)


def test_of_plans_that_are_good_enough_the_one_of_fewest_bytes_is_chosen() -> None:
    found = [
        quality("a", 8, 0.9),
        quality("b", 4, 0.9, 2.0),
        quality("c", 9, 0.9),
        quality("d", 2, 0.8),
    ]
    sizes = {"a": 5, "b": 3, "c": 3, "d": 1}
    chosen = best(found, 0.85, lambda one: sizes[one.policy])
    assert chosen is not None
    assert chosen.policy == "c", "of as many bytes, the least error"


def test_a_policy_that_protects_more_than_any_budget_is_an_error() -> None:
    def measure(policy: str, budget: int) -> Quality:
        raise BudgetError(policy)

    with pytest.raises(BudgetError):
        list(descend(measure, ["a"], [8, 4], 0.5))


@given(st.integers(1, 100_000))
def test_budgets_are_shares_of_the_length(length: int) -> None:
    budgets = budgets_for(length)
    assert budgets == sorted(set(budgets), reverse=True)
    assert all(0 < budget < length for budget in budgets)


def likeliest(prompt: str, text: str) -> list[int]:
    """By one forward of the unmodified model."""
    ids = TOKENIZER(prompt + text)["input_ids"]
    with torch.inference_mode():
        logits = shared_model()(torch.tensor([ids])).logits[0]
    return logits[len(TOKENIZER(prompt)["input_ids"]) - 1 : -1].argmax(dim=-1).tolist()


def test_a_plan_that_evicts_nothing_keeps_everything() -> None:
    meter = QualityMeter(LoadedModel(shared_model(), TOKENIZER), PASSAGES)
    told: list[int] = []
    found = meter.measure("all", 40, Plan.uniform("streaming", budget=40), told.append)
    assert (found.match.value, found.retained_attention, found.output_error) == (1.0, 1.0, 0.0)
    assert found.num_tokens == meter.num_tokens == told[-1] == 30


def led_along(plan: Plan, prompt: str, text: str) -> list[int]:
    """The likeliest tokens of an engine under a plan that is led along a text."""
    found: list[int] = []
    tokens = TOKENIZER(text)["input_ids"]

    def choose(sequences: Sequence[Any], logits: torch.Tensor) -> torch.Tensor:
        found.append(int(logits[0].argmax()))
        return teacher_forced([tokens[len(sequences[0].tokens)]], logits)

    request = Request(prompt, len(tokens), stop_ids=())
    Run(Engine(shared_model(), TOKENIZER, plan), [request], choose).results()
    return found


def test_tokens_are_compared_with_those_of_the_full_cache() -> None:
    meter = QualityMeter(LoadedModel(shared_model(), TOKENIZER), PASSAGES)
    plans = [Plan.uniform("streaming", budget=n, buffer=1) for n in (9, 7)]
    found = [meter.measure("streaming", n, plan) for n, plan in enumerate(plans)]
    for one, plan in zip(found, plans, strict=True):
        pairs = [
            pair
            for text in TEXTS
            for pair in zip(led_along(plan, *text), likeliest(*text), strict=True)
        ]
        assert one.match.value == fmean(ours == full for ours, full in pairs) < 1
    again = QualityMeter(LoadedModel(shared_model(), TOKENIZER), PASSAGES)
    assert again.measure("streaming", 1, plans[1]) == found[1], "the full cache's run is kept"
    assert found[1].retained_attention < found[0].retained_attention < 1
