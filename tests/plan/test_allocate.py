"""The `allocate` hook: called once for each group; budgets are fixed at resolution."""

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
    """Gives deeper layers larger budgets; records the arguments of each call."""

    calls: list[dict[str, Any]] = attrs.field(factory=list)

    @hookimpl
    def allocate(
        self,
        layer_indices: Sequence[int],
        budget: int,
        total: int,
        floors: Sequence[int],
        num_layers: int,
    ) -> list[int]:
        self.calls.append(
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
    """Returns or raises a given answer."""

    answer: object

    @hookimpl
    def allocate(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def budgets(resolved: ResolvedPlan) -> list[int | None]:
    return [layer.budget for layer in resolved.layers]


def one_group_per_layer(resolved: ResolvedPlan) -> Plan:
    """A plan with one group for each resolved layer."""
    return Plan(
        layers=tuple(
            LayerGroup(
                (layer.layer_idx,),
                layer.stack,
                layer.budget,
                layer.buffer,
                prefill_buffer=layer.prefill_buffer or layer.buffer,
            )
            for layer in resolved.layers
        )
    )


def test_allocate_is_called_once_for_each_group() -> None:
    policy = ByDepth()
    plan = Plan(
        (PolicySpec("streaming"), PolicySpec.of(policy)),
        budget=20,
        layers=(LayerGroup((3, 0)), LayerGroup("1:3", budget=30), LayerGroup("4:", budget=9)),
    )
    resolved = plan.resolve(5)
    assert policy.calls == [
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
    assert policy.calls[0]["floors"] == [1, 1]


def test_none_gives_every_layer_the_budget() -> None:
    assert budgets(Plan.uniform("streaming", Answers(None), budget=9).resolve(3)) == [9, 9, 9]


def test_the_last_policy_that_answers_decides() -> None:
    plan = Plan.uniform("streaming", Answers([20, 10]), Answers([9, 21]), budget=15)
    assert budgets(plan.resolve(2)) == [9, 21]
    plan = Plan.uniform("streaming", Answers([20, 10]), Answers(None), budget=15)
    assert budgets(plan.resolve(2)) == [20, 10]


def test_allocate_is_not_called_without_a_budget() -> None:
    policy = ByDepth()
    assert budgets(Plan.uniform("full", policy).resolve(2)) == [None, None]
    assert policy.calls == []


WRONG = {
    "not a list": ("20, 20", "'20, 20'"),
    "floats": ([20.0, 20.0], "[20.0, 20.0]"),
    "booleans": ([True, 39], "[True, 39]"),
    "too few": ([40], "1 budgets"),
    "too many": ([20, 10, 10], "3 budgets"),
    "below the floor": ([37, 3], "layer 1"),
    "too few rows": ([20, 19], "39 rows"),
    "too many rows": ([20, 21], "41 rows"),
}


@pytest.mark.parametrize(("answer", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_answer_raises_and_names_the_policy(answer: object, message: str) -> None:
    plan = Plan.uniform("streaming", Answers(answer), budget=20)
    with pytest.raises(HookResultError) as caught:
        plan.resolve(2)
    assert "'answers'" in str(caught.value)
    assert message in str(caught.value)
    assert "hooks.md#allocate" in str(caught.value)


def test_a_policy_that_raises_is_named() -> None:
    plan = Plan.uniform("streaming", Answers(RuntimeError("no idea")), budget=20)
    with pytest.raises(HookError, match=r"'answers'.*RuntimeError.*allocate"):
        plan.resolve(2)


def test_impossible_floors_raise_before_allocate_is_called() -> None:
    policy = ByDepth()
    with pytest.raises(BudgetError, match="12 rows"):
        Plan.uniform("pyramidkv", "protect", policy, budget=11).resolve(4)
    assert policy.calls == []


@given(
    st.integers(1, 40),
    st.integers(8, 300),
    st.floats(1, 50),
    st.sampled_from([("pyramidkv",), ("pyramidkv", "protect"), ("pyramidkv", "rkv")]),
)
def test_a_resolved_plan_as_groups_resolves_to_itself(
    num_layers: int, spare: int, beta: float, stack: tuple[str, ...]
) -> None:
    budget = spare + 4
    knobs = {"pyramidkv": {"beta": beta}}
    resolved = Plan.uniform(*stack, budget=budget, knobs=knobs).resolve(num_layers)
    assert sum(budgets(resolved)) == budget * num_layers
    again = one_group_per_layer(resolved).resolve(num_layers)
    assert again == resolved
    assert again.digest() == resolved.digest()


def test_slabs_have_the_allocated_length() -> None:
    plan = Plan.uniform("pyramidkv", budget=16, buffer=4, knobs={"pyramidkv": {"window_size": 4}})
    engine = Engine(tiny.shared_model(num_layers=4), None, plan, slots=2)
    wanted = [layer.budget for layer in engine.plan.layers]
    assert sum(wanted) == 64
    assert wanted == sorted(wanted, reverse=True)
    assert len(set(wanted)) == 4
    run = engine.generate([[1, 2, 3] * 12, [4, 5]], max_new_tokens=24)
    results = run.results()
    assert [len(result.tokens) for result in results] == [24, 24]
    assert max(result.peak_rows for result in results) == wanted[0] + 4
