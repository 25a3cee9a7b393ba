"""`check_plan` reports every problem of a plan once."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from malformed_plans import MALFORMED
from plan_strategies import anything, mutated, plan_data, tables

from kvpolicy import Plan
from kvpolicy.errors import KVPolicyError
from kvpolicy.plan.plan import check_plan

NUM_LAYERS = 4


def problems(data: dict[str, Any], *overrides: str) -> list[str]:
    return [str(one) for one in check_plan(data, overrides, num_layers=NUM_LAYERS).problems]


def problem_of_check(data: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """What is wrong with the problems that are found in a malformed plan."""
    found = problems(data)
    if len(found) != len(names) or not all(map(str.__contains__, found, names)):
        return f"expected {names}, came {found}"
    try:
        Plan.from_dict(data).resolve(NUM_LAYERS)
    except KVPolicyError as error:
        return None if str(error) == found[0] else f"resolving says {error}"
    return "it resolves"


def test_every_problem_is_reported_once_and_resolving_raises_the_first() -> None:
    wrong = {kind: problem_of_check(data, names) for kind, (data, names) in MALFORMED.items()}
    assert {kind: problem for kind, problem in wrong.items() if problem} == {}


def test_all_problems_of_a_plan_are_reported_together() -> None:
    data = {
        "bugdet": 3,
        "budget": 9,
        "buffer": 0,
        "stack": ["rvk", {"policy": "rkv", "mix": 3}],
        "sampling": {},
        "layers": [{"where": "0:2", "stack": ["h2o"]}, {"where": [2, 9], "stak": ["x"]}],
    }
    found = "\n".join(problems(data, "rkw.mix_lambda=1", "nonsense"))
    for words in (
        *("'bugdet'", "'rvk'", "'mix'", "'sampling'", "'stak'", "layer 9", "in buffer: 0"),
        *("rkw.mix_lambda=1", "nonsense"),
    ):
        assert words in found
    assert found.count("\n") == 8


def test_values_that_depend_on_a_malformed_one_are_not_checked() -> None:
    # The budget is malformed: it is not reported as missing or too small as well.
    (problem,) = problems({"budget": "many", "stack": ["rkv"]})
    assert "'many'" in problem
    # A stack with an unknown policy is not reported as missing.
    (problem,) = problems({"budget": 9, "layers": [{"stack": ["h20"]}]})
    assert "'h20'" in problem


def test_a_malformed_group_leaves_the_others_to_be_checked() -> None:
    # None is taken for another: one has no budget, and one no policy.
    groups = [3, {"where": "2:", "stack": ["rkv"]}, {"where": "0:1", "budget": 9}]
    malformed, no_budget, no_policy = problems({"layers": groups})
    assert "layers[0]" in malformed
    assert "layer 2 (rkv)" in no_budget or "layer 2 (rkv)" in no_policy
    assert "'0:1'" in no_budget + no_policy


@given(plan_data(num_layers=NUM_LAYERS))
def test_a_valid_plan_has_no_problem(data: dict[str, Any]) -> None:
    found = check_plan(data, num_layers=NUM_LAYERS)
    assert found.problems == ()
    assert found.resolved == Plan.from_dict(data).resolve(NUM_LAYERS)


@given(
    mutated(num_layers=NUM_LAYERS) | tables | anything,
    st.lists(st.text("=.layers0budgt ", max_size=9), max_size=1),
)
def test_a_plan_has_problems_exactly_if_resolving_fails(data: Any, overrides: list[str]) -> None:
    found = check_plan(data, overrides, num_layers=NUM_LAYERS)
    try:
        resolved = Plan.from_dict(data, overrides).resolve(NUM_LAYERS)
    except KVPolicyError:
        assert found.problems
        assert found.resolved is None
    else:
        assert found.problems == ()
        assert found.resolved == resolved
    assert len({str(problem) for problem in found.problems}) == len(found.problems)


@given(mutated(num_layers=NUM_LAYERS))
def test_without_a_model_only_the_plan_itself_is_checked(
    data: dict[str, Any],
) -> None:
    alone = {str(one) for one in check_plan(data).problems}
    assert alone <= {str(one) for one in check_plan(data, num_layers=NUM_LAYERS).problems}
