"""Resolved plans written as plan files and read again, and stable digests."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import plan_data

from kvpolicy import Plan, hookimpl
from kvpolicy.entry_points import installed
from kvpolicy.errors import PlanError
from kvpolicy.hooks.discovery import load_policy_file
from kvpolicy.plan import dump
from kvpolicy.plan.dump import to_plan_data, to_toml
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan
from kvpolicy.plan.spec import PolicySpec

NUM_LAYERS = 4


@given(plan_data(num_layers=NUM_LAYERS))
def test_a_resolved_plan_survives_toml_and_json(data: dict[str, Any]) -> None:
    resolved = Plan.from_dict(data).resolve(NUM_LAYERS)
    for written in (
        tomllib.loads(to_toml(resolved)),
        json.loads(json.dumps(to_plan_data(resolved))),
    ):
        again = Plan.from_dict(written).resolve(NUM_LAYERS)
        assert again == resolved
        assert again.digest() == resolved.digest()
        assert to_plan_data(again) == to_plan_data(resolved), "writing is idempotent"


@pytest.mark.few(8)
@pytest.mark.parametrize("name", installed("kvpolicy.plans"))
def test_an_installed_plan_survives_toml(name: str) -> None:
    # Plans for a model name its layers.
    num_layers = 30 if "smollm2" in name else 4 if "reasoner" in name else 28
    resolved = Plan.load(name).resolve(num_layers)
    again = Plan.from_dict(tomllib.loads(to_toml(resolved))).resolve(num_layers)
    assert again == resolved
    assert again.digest() == resolved.digest()


def test_equal_layers_are_one_group_and_shares_are_comments() -> None:
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


def test_equal_layers_stay_separate_if_a_policy_distributes_rows() -> None:
    groups = [{"where": "::2", "budget": 9}, {"where": "1::2", "budget": 15}]
    resolved = Plan.from_dict({"stack": ["pyramidkv"], "buffer": 8, "layers": groups}).resolve(4)
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
    """A policy whose knob takes any value."""

    knob: object = None

    @hookimpl
    def score(self, positions):
        return positions.float()


@given(knobs)
def test_toml_values_survive_writing(knob: object) -> None:
    assert tomllib.loads(f"knob = {dump._value(knob)}") == {"knob": knob}


@pytest.mark.parametrize("knob", [{1, 2}, object(), b"bytes", {3: 4}, ["a", {3}], "\ud800"])
def test_a_knob_that_toml_cannot_represent_is_refused(knob: object) -> None:
    layer = LayerPlan(0, (PolicySpec("anything", {"knob": knob}),), 9, 3, bounded=True)
    with pytest.raises(PlanError, match=r"'anything'.*knob"):
        to_plan_data(ResolvedPlan((layer,)))


def test_a_policy_object_cannot_be_written() -> None:
    resolved = Plan.uniform(Anything(), budget=9).resolve(2)
    with pytest.raises(PlanError, match="'anything'"):
        to_toml(resolved)


CHOOSY = """
import attrs
from kvpolicy import hookimpl

@attrs.define(eq=False)
class Choosy:
    knob: object = 3

    @hookimpl
    def score(self, keys):
        return keys.norm(dim=-1)
"""


def test_a_knob_set_to_none_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "choosy.py"
    file.write_text(CHOOSY, encoding="utf-8")
    load_policy_file(file)
    by_default = Plan.from_dict({"budget": 9, "stack": ["choosy"]}).resolve(2)
    assert to_plan_data(by_default)["layers"][0]["stack"] == [{"policy": "choosy", "knob": 3}]
    chosen = Plan(stack=(PolicySpec("choosy", {"knob": None}),), budget=9).resolve(2)
    with pytest.raises(PlanError, match="None"):
        to_plan_data(chosen)


# Results are stored by digest: a change of a digest would orphan them.
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
def test_digests_do_not_change(data: dict[str, Any], num_layers: int, digest: str) -> None:
    assert Plan.from_dict(data).resolve(num_layers).digest() == digest


CHANGES: list[dict[str, Any]] = [
    {"stack": ["snapkv"]},
    {"stack": ["h2o", "protect"]},
    {"stack": [{"policy": "h2o", "n_recent": 5}]},
    {"budget": 33},
    {"buffer": 17},
    {"prompt": "keep"},
    {"heads": "shared"},
    {"prefill_buffer": 64},
    {"padding": "stored"},
    {"schedule": ["skipkv_batches"]},
]


def test_whatever_a_plan_says_is_in_its_digest_and_its_data() -> None:
    base = {"stack": ["h2o"], "budget": 32, "buffer": 16}
    plans = [Plan.from_dict({**base, **change}).resolve(2) for change in ({}, *CHANGES)]
    digests = [plan.digest() for plan in plans]
    data = [json.dumps(plan.to_dict()) for plan in plans]
    assert len(set(digests)) == len(set(data)) == len(plans)


@given(plan_data(num_layers=NUM_LAYERS), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_change_the_digest(data: dict[str, Any], random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            keys = list(value)
            random.shuffle(keys)
            return {key: shuffled(value[key]) for key in keys}
        return [shuffled(one) for one in value] if isinstance(value, list) else value

    mixed = Plan.from_dict(shuffled(data)).resolve(NUM_LAYERS)
    assert mixed.digest() == Plan.from_dict(data).resolve(NUM_LAYERS).digest()


@pytest.mark.nightly
def test_a_digest_is_the_same_in_every_process() -> None:
    """Sets and objects among the knobs are hashed by their contents, too."""
    code = (
        "from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan\n"
        "from kvpolicy.plan.spec import PolicySpec\n"
        "knobs = {'names': {'a', 'b', 'c', 'd'}, 'other': object()}\n"
        "spec = PolicySpec('streaming', knobs)\n"
        "digest = ResolvedPlan((LayerPlan(0, (spec,), 3, 4, True),)).digest()\n"
        "print(digest)\n"
    )
    here: dict[str, Any] = {}
    exec(code, here)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [here["digest"]]


def test_texts_of_any_language_survive_toml() -> None:
    # What JSON would write as two escapes, TOML has no such escapes for.
    text = "é 文 \U0001f600 \x7f \\"
    resolved = Plan.from_dict(
        {"layers": [{"stack": [{"policy": "epicache", "prompt": text}], "budget": 40}]}
    ).resolve(2)
    (group,) = tomllib.loads(to_toml(resolved))["layers"]
    assert group["stack"][0]["prompt"] == text


def test_stored_pads_leave_rows_for_what_is_protected_or_one() -> None:
    resolved = Plan.uniform("h2o", budget=8, buffer=4, padding="stored").resolve(1)
    (layer,) = resolved.layers
    spare = {
        number: attrs.evolve(layer, num_protected=number).num_spare_rows for number in (0, 1, 5)
    }
    assert spare == {0: 7, 1: 7, 5: 3}
    (unbounded,) = Plan.uniform("full").resolve(1).layers
    assert unbounded.num_spare_rows == 0
