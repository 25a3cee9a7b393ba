"""A resolved plan, written as a plan and read again, comes to the same; digests are for ever."""

import json
import os
import subprocess
import sys
import tomllib
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plandata import plan_data

from kvpolicy import Plan, hookimpl
from kvpolicy.entry_points import installed
from kvpolicy.errors import PlanError
from kvpolicy.plan.dump import to_plan_data, to_toml
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan
from kvpolicy.plan.spec import PolicySpec

NUM_LAYERS = 4


@given(plan_data(num_layers=NUM_LAYERS))
def test_a_resolved_plan_comes_back_from_toml_and_json(data: dict[str, Any]) -> None:
    resolved = Plan.from_dict(data).resolve(NUM_LAYERS)
    for written in (
        tomllib.loads(to_toml(resolved)),
        json.loads(json.dumps(to_plan_data(resolved))),
    ):
        again = Plan.from_dict(written).resolve(NUM_LAYERS)
        assert again == resolved
        assert again.digest() == resolved.digest()
        assert to_plan_data(again) == to_plan_data(resolved), "writing is idempotent"


@pytest.mark.parametrize("name", installed("kvpolicy.plans"))
def test_an_installed_plan_comes_back(name: str) -> None:
    num_layers = 4 if "reasoner" in name else 28  # plans for a model name its layers
    resolved = Plan.load(name).resolve(num_layers)
    again = Plan.from_dict(tomllib.loads(to_toml(resolved))).resolve(num_layers)
    assert again == resolved
    assert again.digest() == resolved.digest()


def test_layers_that_are_alike_are_one_group_and_shares_are_told() -> None:
    data = {
        "budget": "25%",
        "length": 1000,
        "layers": [{"where": "::2", "stack": ["h2o"]}, {"where": "1::2", "stack": ["full"]}],
    }
    text = to_toml(attrs.evolve(Plan.from_dict(data), name="mine\n= 3").resolve(4))
    groups = tomllib.loads(text)["layers"]
    assert [group["where"] for group in groups] == [[0, 2], [1, 3]]
    assert "budget = 250 # 25% of 1,000 tokens is 250 rows" in text
    assert text.startswith("# mine = 3, resolved for 4 layers\n# digest ")


def test_layers_that_are_alike_stay_apart_where_a_group_would_share_its_rows_anew() -> None:
    groups = [{"where": "::2", "budget": 9}, {"where": "1::2", "budget": 15}]
    resolved = Plan.from_dict({"stack": ["pyramidkv"], "layers": groups}).resolve(4)
    assert [layer.budget for layer in resolved.layers] == [9, 21, 9, 9]
    again = Plan.from_dict(tomllib.loads(to_toml(resolved)))
    assert [group.where for group in again.layers] == [(0,), (1,), (2,), (3,)]
    assert again.resolve(4) == resolved


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
knobs = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@attrs.define(eq=False)
class Anything:
    """A policy that takes whatever it is given."""

    knob: object = None

    @hookimpl
    def score(self, positions):
        return positions.float()


@given(knobs)
def test_any_knob_that_a_file_can_hold_is_written_as_it_is(knob: object) -> None:
    # Written and read only: the policy itself is installed nowhere.
    from kvpolicy.plan import dump as planwriter

    assert tomllib.loads(f"knob = {planwriter._value(knob)}") == {"knob": knob}


@pytest.mark.parametrize("knob", [{1, 2}, object(), b"bytes", {3: 4}, ["a", {3}], "\ud800"])
def test_a_knob_that_no_file_can_hold_is_refused(knob: object) -> None:
    layer = LayerPlan(0, (PolicySpec("anything", {"knob": knob}),), 9, 3, bounded=True)
    with pytest.raises(
        PlanError, match=r"'anything' has a knob .*, which a plan file cannot represent"
    ):
        to_plan_data(ResolvedPlan((layer,)))


def test_a_policy_made_in_python_is_not_written_into_a_file() -> None:
    resolved = Plan.uniform(Anything(), budget=9).resolve(2)
    with pytest.raises(PlanError, match="policy 'anything' was made in Python and cannot be"):
        to_toml(resolved)


def test_a_knob_that_is_none_by_choice_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpolicy.hooks import discovery

    @attrs.define(eq=False)
    class Choosy(Anything):
        knob: object = 3

    monkeypatch.setitem(discovery._from_files, "choosy", (Choosy, "choosy.py"))
    by_default = Plan.from_dict({"budget": 9, "stack": ["choosy"]}).resolve(2)
    assert to_plan_data(by_default)["layers"][0]["stack"] == [{"policy": "choosy", "knob": 3}]
    chosen = Plan(stack=(PolicySpec("choosy", {"knob": None}),), budget=9).resolve(2)
    with pytest.raises(PlanError, match="a knob that is None, which TOML cannot represent"):
        to_plan_data(chosen)


# Digests name cells, folders and results of runs long past: a change of one orphans them all.
DIGESTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "full": ({"stack": ["full"]}, 4, "583b6c9afff34022"),
    "count": ({"budget": 128, "buffer": 32, "stack": ["rkv", "protect"]}, 4, "dbfde571f0b00952"),
    "share": (
        {"budget": "25%", "length": 512, "buffer": 32, "stack": ["rkv", "protect"]},
        4,
        "dbfde571f0b00952",
    ),
    "mixed": (
        {
            "buffer": 16,
            "padding": "stored",
            "schedule": ["skipkv_batches"],
            "layers": [
                {"where": "-1:", "stack": ["full"]},
                {"where": "0:-1", "stack": [{"policy": "rkv", "mix_lambda": 0.25}], "budget": 64},
            ],
        },
        6,
        "df0b182e7e244a28",
    ),
}


@pytest.mark.parametrize(("data", "num_layers", "digest"), DIGESTS.values(), ids=DIGESTS)
def test_a_digest_stays_what_it_was(data: dict[str, Any], num_layers: int, digest: str) -> None:
    assert Plan.from_dict(data).resolve(num_layers).digest() == digest


def test_a_share_has_the_digest_of_its_count() -> None:
    assert DIGESTS["share"][2] == DIGESTS["count"][2]


@given(plan_data(num_layers=NUM_LAYERS), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(data: dict[str, Any], random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            keys = list(value)
            random.shuffle(keys)
            return {key: shuffled(value[key]) for key in keys}
        return [shuffled(one) for one in value] if isinstance(value, list) else value

    mixed = Plan.from_dict(shuffled(data)).resolve(NUM_LAYERS)
    assert mixed.digest() == Plan.from_dict(data).resolve(NUM_LAYERS).digest()


def test_a_digest_is_the_same_in_every_process() -> None:
    code = (
        "import json, sys; from kvpolicy import Plan\n"
        "from kvpolicy.plan.spec import PolicySpec\n"
        "from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan\n"
        "for data, n, digest in json.loads(sys.stdin.read()):\n"
        "    print(Plan.from_dict(data).resolve(n).digest())\n"
        "class Odd: pass\n"
        "knobs = {'names': {'a', 'b', 'c', 'd'}, 'odd': Odd()}\n"
        "spec = PolicySpec('streaming', knobs)\n"
        "print(ResolvedPlan((LayerPlan(0, (spec,), 3, 4, True),)).digest())\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(list(DIGESTS.values())),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("0", "1")
    ]
    assert said[0][:-1] == [digest for _, _, digest in DIGESTS.values()]
    assert said[0] == said[1], "sets and objects are hashed by what they are, too"
