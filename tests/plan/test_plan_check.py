"""`check_plan` reports every problem of a plan once."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import anything, mutated, plan_data, tables

from kvpolicy import Plan
from kvpolicy.errors import KVPolicyError
from kvpolicy.plan.plan import check_plan

NUM_LAYERS = 4


def problems(data: dict[str, Any], *overrides: str) -> list[str]:
    return [str(one) for one in check_plan(data, overrides, num_layers=NUM_LAYERS).problems]


#: Malformed plans, with a part of the message of each problem, in order.
CLAUSES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown key": ({"bugdet": 3, "stack": ["full"]}, ("unknown key 'bugdet'; did you mean",)),
    "two unknown keys": ({"a": 3, "b": 4, "stack": ["full"]}, ("key 'a'", "key 'b'")),
    "name": ({"name": "x", "stack": ["full"]}, ("unknown key 'name'. Known are: stack",)),
    "sampling": (
        {"sampling": {"temperature": 1}, "stack": ["full"]},
        ("section 'sampling' is reserved; set it with --temperature",),
    ),
    "steering": (
        {"steering": {"vector": "x"}, "stack": ["full"]},
        ("section 'steering' is reserved; list a policy that steers",),
    ),
    "both sections": (
        {"steering": {}, "sampling": {}, "stack": ["full"]},
        ("'sampling' is reserved", "'steering' is reserved"),
    ),
    "budget of the wrong type": (
        {"budget": [3], "stack": ["h2o"]},
        ("[3] is not a count or a share",),
    ),
    "budget is text": ({"budget": "64", "stack": ["h2o"]}, ("'64' is not a count or a share",)),
    "budget is a fraction": ({"budget": 0.5, "stack": ["h2o"]}, ("0.5 is not a count",)),
    "budget is true": ({"budget": True, "stack": ["h2o"]}, ("True is not a count",)),
    "knob of the wrong type": (
        {"budget": 64, "stack": [{"policy": "rkv", "window_size": "8"}]},
        ("'window_size' must be <class 'int'>",),
    ),
    "buffer of the wrong type": (
        {"budget": 9, "buffer": "x", "stack": ["h2o"]},
        ("in buffer: 'x' is not a count",),
    ),
    "length of the wrong type": (
        {"budget": "9%", "length": 1.5, "stack": ["h2o"]},
        ("in length: 1.5 is not a count",),
    ),
    "no length": ({"budget": "9%", "stack": ["h2o"]}, ("has no length to refer to; write length",)),
    "a share of nothing": (
        {"budget": "0%", "length": 9, "stack": ["h2o"]},
        ("is 0 rows; it must be at least 1",),
    ),
    "budget 0": (
        {"budget": 0, "stack": ["h2o"]},
        ("in budget: 0 is out of range; write a whole number from 1",),
    ),
    "budget and buffer 0": (
        {"budget": 0, "buffer": 0, "stack": ["h2o"]},
        ("in budget: 0 is out", "in buffer: 0 is out"),
    ),
    "more than can be counted": (
        {"budget": 2**40, "stack": ["h2o"]},
        ("1099511627776 is out of range",),
    ),
    "no budget": ({"stack": ["h2o"]}, ("gives layer 0 (h2o) no budget",)),
    "budget below what is protected": (
        {"budget": 4, "stack": ["rkv"]},
        ("budget of 4, but its policies (rkv) protect 8 rows",),
    ),
    "no policy": ({"budget": 4}, ("names no policy for layers 'all'",)),
    "stack of the wrong type": ({"budget": 9, "stack": "h2o"}, ("in stack: 'h2o' is not a list",)),
    "policy of the wrong type": (
        {"budget": 9, "stack": ["h2o", 3, {"knob": 1}]},
        ("in stack[1]: 3 is not a policy", "in stack[2]: {'knob': 1} is not a policy"),
    ),
    "unknown policies": (
        {"budget": 9, "stack": ["hh2o", "protct"]},
        ("no policy is named 'hh2o'; did you mean h2o", "'protct'; did you mean protect"),
    ),
    "unknown policy for schedule": (
        {"stack": ["full"], "schedule": ["skipkv_batchs"]},
        ("'skipkv_batchs'; did you mean skipkv_batches",),
    ),
    "unknown knob": (
        {"budget": 9, "stack": [{"policy": "rkv", "mix_lamda": 1}]},
        ("no knob 'mix_lamda'; did you mean mix_lambda",),
    ),
    "refused knobs of two policies": (
        {
            "budget": 9,
            "stack": [{"policy": "rkv", "mix_lambda": 2}, {"policy": "protect", "n_sink": -1}],
        },
        (
            "policy 'rkv' refuses its knobs: 'mix_lambda' must be <= 1: 2",
            "policy 'protect' refuses its knobs",
        ),
    ),
    "padding": (
        {"stack": ["full"], "padding": "left"},
        ("in padding: 'left' is not a padding; write one of none, stored",),
    ),
    "layers of the wrong type": (
        {"stack": ["full"], "layers": 3},
        ("in layers: 3 is not a list of groups",),
    ),
    "group of the wrong type": (
        {"stack": ["full"], "layers": [3]},
        ("in layers[0]: 3 is not a group of layers",),
    ),
    "unknown keys in groups": (
        {"stack": ["full"], "layers": [{"where": "0:2", "stak": 1}, {"where": "2:", "buget": 2}]},
        ("in layers[0]: unknown key 'stak'", "in layers[1]: unknown key 'buget'"),
    ),
    "where of the wrong type": (
        {"stack": ["full"], "layers": [{"where": 3}]},
        ("in layers[0].where: 3 is not a set of layers",),
    ),
    "where is empty": (
        {"stack": ["full"], "layers": [{"where": []}]},
        ("in layers[0].where: [] is not a set of layers",),
    ),
    "where of no slice": (
        {"stack": ["full"], "layers": [{"where": "first"}]},
        ("in layers[0].where: 'first' is not a set of layers; write",),
    ),
    "a step of 0": (
        {"stack": ["full"], "layers": [{"where": "::0"}]},
        ("in layers[0].where: '::0' is not a set of layers",),
    ),
    "layer beyond the model": (
        {"stack": ["full"], "layers": [{"where": [0, 9]}]},
        ("names layer 9; the model has layers 0 to 3",),
    ),
    "an empty slice": (
        {"stack": ["full"], "layers": [{"where": "7:"}]},
        ("covers none of the model's 4 layers",),
    ),
    "overlaps and gaps": (
        {"stack": ["full"], "layers": [{"where": [0, 1, 0]}, {"where": [1]}]},
        (
            "covers layer 0 twice, again in (0, 1, 0)",
            "covers layer 1 twice, again in (1,)",
            "does not cover layers 2 to 3 of 0 to 3",
        ),
    ),
    "two groups with two mistakes each": (
        {
            "layers": [
                {"where": "0:2", "stack": ["h2o"], "budget": 0, "buffer": 0},
                {"where": "2:", "stack": ["rkv"], "budget": 3, "buffer": -1},
            ]
        },
        (
            "in layers[0].budget: 0 is out",
            "in layers[0].buffer: 0 is out",
            "in layers[1].buffer: -1 is out",
        ),
    ),
    "extends of the wrong type": ({"extends": 3}, ("extends is 3; write the name of one plan",)),
    "extends nothing": ({"extends": "none.toml"}, ("none.toml' cannot be read",)),
    "a key of the wrong type": ({3: 4}, ("has a key 3; keys are texts",)),
}


@pytest.mark.parametrize(("data", "messages"), CLAUSES.values(), ids=CLAUSES)
def test_every_problem_is_reported_once(data: dict[str, Any], messages: tuple[str, ...]) -> None:
    found = problems(data)
    assert len(found) == len(messages), found
    for problem, message in zip(found, messages, strict=True):
        assert message in problem
        assert "\n" not in problem


@pytest.mark.parametrize("data", [data for data, _ in CLAUSES.values()], ids=CLAUSES)
def test_resolving_raises_the_first_problem(data: dict[str, Any]) -> None:
    with pytest.raises(KVPolicyError) as caught:
        Plan.from_dict(data).resolve(NUM_LAYERS)
    assert str(caught.value) == problems(data)[0]


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
