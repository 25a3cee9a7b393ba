"""Budgets that a policy shares out: asked once a group, exact, and fixed when resolved."""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.errors import BudgetError, HookError, HookResultError
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.toolkit.apportion import largest_remainder


@attrs.define(eq=False)
class ByDepth:
    """The deeper a layer, the more room; notes what it was asked."""

    asked: list[dict[str, Any]] = attrs.field(factory=list)

    @hookimpl
    def allocate(
        self,
        layer_indices: Sequence[int],
        budget: int,
        total: int,
        floors: Sequence[int],
        num_layers: int,
    ) -> list[int]:
        self.asked.append(
            {
                "layer_indices": list(layer_indices),
                "budget": budget,
                "total": total,
                "floors": list(floors),
                "num_layers": num_layers,
            }
        )
        return largest_remainder(total, [1 + layer_idx for layer_idx in layer_indices], floors)


@attrs.define(eq=False)
class Answers:
    """Answer what a test wants answered."""

    answer: object

    @hookimpl
    def allocate(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def budgets(resolved: ResolvedPlan) -> list[int | None]:
    return [layer.budget for layer in resolved.layers]


def written_back(resolved: ResolvedPlan) -> Plan:
    """The plan that says what each layer does, a group for each."""
    return Plan(
        layers=tuple(
            LayerGroup((layer.layer_idx,), layer.stack, layer.budget, layer.buffer)
            for layer in resolved.layers
        )
    )


def test_a_group_is_asked_once_with_all_it_has_to_know() -> None:
    policy = ByDepth()
    plan = Plan(
        (PolicySpec("streaming"), PolicySpec.of(policy)),
        budget=20,
        layers=(LayerGroup((3, 0)), LayerGroup("1:3", budget=30), LayerGroup("4:", budget=9)),
    )
    resolved = plan.resolve(5)
    assert policy.asked == [
        {
            "layer_indices": [0, 3],
            "budget": 20,
            "total": 40,
            "floors": [5, 5],
            "num_layers": 5,
        },
        {"layer_indices": [1, 2], "budget": 30, "total": 60, "floors": [5, 5], "num_layers": 5},
        {"layer_indices": [4], "budget": 9, "total": 9, "floors": [5], "num_layers": 5},
    ]
    assert budgets(resolved) == [11, 25, 35, 29, 9]


def test_the_floor_of_a_layer_that_protects_nothing_is_one_row() -> None:
    policy = ByDepth()
    Plan.uniform("random", policy, budget=3).resolve(2)
    assert policy.asked[0]["floors"] == [1, 1]


def test_without_an_opinion_every_layer_has_the_budget() -> None:
    assert budgets(Plan.uniform("streaming", Answers(None), budget=9).resolve(3)) == [9, 9, 9]


def test_the_last_one_listed_decides() -> None:
    plan = Plan.uniform("streaming", Answers([20, 10]), Answers([9, 21]), budget=15)
    assert budgets(plan.resolve(2)) == [9, 21]
    plan = Plan.uniform("streaming", Answers([20, 10]), Answers(None), budget=15)
    assert budgets(plan.resolve(2)) == [20, 10]


def test_where_everything_stays_there_is_nothing_to_share() -> None:
    policy = ByDepth()
    assert budgets(Plan.uniform("full", policy).resolve(2)) == [None, None]
    assert policy.asked == []


WRONG = {
    "no list": ("20, 20", "returned '20, 20'; expected 2 integers, one for each layer"),
    "no whole numbers": ([20.0, 20.0], "expected 2 integers, one for each layer"),
    "truth values": ([True, 39], "2 whole numbers"),
    "too few": ([40], "returned 1 budgets; expected 2 integers"),
    "too many": ([20, 10, 10], "returned 3 budgets"),
    "below the floor": ([37, 3], "gives layer 1 of its group 3 rows; expected at least 5"),
    "lost rows": ([20, 19], "gives 39 rows to its layers; expected exactly 40"),
    "invented rows": ([20, 21], "shares 41 rows"),
}


@pytest.mark.parametrize(("answer", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_answer_is_refused_and_its_policy_named(answer: object, said: str) -> None:
    plan = Plan.uniform("streaming", Answers(answer), budget=20)
    with pytest.raises(HookResultError) as caught:
        plan.resolve(2)
    assert str(caught.value).startswith("policy 'answers' ")
    assert said in str(caught.value)
    assert "in allocate(). See docs/reference/hooks.md#allocate" in str(caught.value)


def test_a_policy_that_raises_is_named() -> None:
    plan = Plan.uniform("streaming", Answers(RuntimeError("no idea")), budget=20)
    with pytest.raises(HookError, match=r"'answers' raised RuntimeError in allocate\(\): no idea"):
        plan.resolve(2)


def test_impossible_floors_are_stated_before_anybody_is_asked() -> None:
    policy = ByDepth()
    with pytest.raises(BudgetError, match="protect 12 rows: 4 first and 8 newest"):
        Plan.uniform("pyramidkv", "protect", policy, budget=11).resolve(4)
    assert policy.asked == []


@given(
    st.integers(1, 40),
    st.integers(8, 300),
    st.floats(1, 50),
    st.sampled_from([("pyramidkv",), ("pyramidkv", "protect"), ("pyramidkv", "rkv")]),
)
def test_a_resolved_plan_written_back_is_the_same_plan(
    num_layers: int, spare: int, beta: float, stack: tuple[str, ...]
) -> None:
    budget = spare + 4
    knobs = {"pyramidkv": {"beta": beta}}
    resolved = Plan.uniform(*stack, budget=budget, knobs=knobs).resolve(num_layers)
    assert sum(budgets(resolved)) == budget * num_layers
    again = written_back(resolved).resolve(num_layers)
    assert again == resolved
    assert again.digest() == resolved.digest()


def test_slabs_are_as_long_as_the_shares_say() -> None:
    plan = Plan.uniform("pyramidkv", budget=16, buffer=4, knobs={"pyramidkv": {"window_size": 4}})
    engine = Engine(tiny.shared_model(num_layers=4), None, plan, slots=2)
    wanted = [layer.budget for layer in engine.plan.layers]
    assert sum(wanted) == 64
    assert wanted == sorted(wanted, reverse=True)
    assert len(set(wanted)) == 4
    run = engine.generate([[1, 2, 3] * 12, [4, 5]], max_new_tokens=60)
    results = run.results()
    assert [len(result.tokens) for result in results] == [60, 60]
    assert max(result.peak_rows for result in results) == wanted[0] + 4
