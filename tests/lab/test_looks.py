"""Looks of series: no two are alike, and a policy keeps its colour."""

import sys
from importlib.metadata import EntryPoint
from itertools import combinations
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.hooks import discovery
from kvpolicy.lab import looks
from kvpolicy.lab.labels import short_labels
from kvpolicy.lab.looks import COLOURS, INK, MARKERS, looks_of, policy_of, registered_colours

NAMES = st.text("abcdefgh", min_size=1, max_size=3)

# They have the colour of what they are stacked with.
ADD_ONS = {
    "adakv",
    "caote",
    "layer_sensitivity",
    "merge",
    "protect",
    "protect_images",
    "rerotate",
    "seal",
    "skipkv_batches",
}


def test_forty_series_of_one_policy_look_different() -> None:
    for policy in ("rkv", "of another package", ""):
        found = looks_of({f"series {i}": policy for i in range(40)}).values()
        assert len(set(found)) == 40
        assert len({look.colour for look in found}) == 1


@given(policies=st.lists(NAMES, min_size=24, max_size=45))
def test_series_of_any_policies_look_different(policies: list[str]) -> None:
    found = looks_of({str(i): policy for i, policy in enumerate(policies)})
    assert len(set(found.values())) == len(policies)


@given(policies=st.lists(NAMES, min_size=1, unique=True), others=st.lists(NAMES, unique=True))
def test_the_colour_of_a_policy_does_not_depend_on_others(
    policies: list[str], others: list[str]
) -> None:
    alone = {policy: looks_of({policy: policy})[policy].colour for policy in policies}
    among = looks_of({policy: policy for policy in [*others, *policies]})
    assert {policy: among[policy].colour for policy in policies} == alone
    assert INK not in alone.values()


def test_policies_of_different_colours_have_different_markers() -> None:
    by_colour = {looks_of({"": f"p{i}"})[""].colour: f"p{i}" for i in range(200)}
    assert len(by_colour) == len(COLOURS) - 1
    for some in combinations(by_colour.values(), 2):
        assert len({look.marker for look in looks_of({name: name for name in some}).values()}) == 2
    most = list(by_colour.values())[: len(MARKERS)]
    assert len({look.marker for look in looks_of({name: name for name in most}).values()}) == len(
        most
    )


def test_installed_policies_that_score_have_colours() -> None:
    registered = registered_colours()
    known = discovery.installed(discovery.GROUP)
    assert registered.keys() <= known.keys(), "a colour of no policy"
    ours = {name: point for name, point in known.items() if point.dist.name == "kvpolicy"}
    assert ours.keys() - ADD_ONS <= registered.keys(), "give the policy a colour in its package"
    # There are fewer colours that can be told apart than policies: baselines have one each. What
    # else has the same is shown by another marker and line style.
    for package in ("kvpolicy_baselines", "skipkv_plugin"):
        colours = [registered[name] for name in registered if ours[name].module.startswith(package)]
        assert len(set(colours)) == len(colours)


@pytest.mark.parametrize(
    ("stacks", "policy"),
    [
        ([["h2o"]], "h2o"),
        ([["h2o", "protect"]], "h2o"),
        ([["h2o", "rkv", "mix"]], "mix"),
        ([["mine", "protect"]], "mine"),
        ([["streaming"], ["h2o"], ["h2o"]], "h2o"),
        ([[]], ""),
        ([], ""),
    ],
)
def test_the_colour_of_a_stack_is_that_of_what_scores(stacks: list[list[str]], policy: str) -> None:
    layers = [{"stack": [{"policy": name} for name in stack], "budget": 8} for stack in stacks]
    assert policy_of({"layers": layers}) == policy


def test_layers_without_a_budget_give_no_colour_beside_others() -> None:
    full = {"stack": [{"policy": "full"}], "budget": None}
    evicting = {"stack": [{"policy": "h2o"}], "budget": 8}
    assert policy_of({"layers": [full, full, evicting]}) == "h2o"
    assert policy_of({"layers": [full, full]}) == "full"
    assert policy_of({}) == ""


def test_colours_of_a_broken_package_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(group: str) -> dict[str, Any]:
        targets = ["no_such_module:COLOURS", "math:pi", "broken:STRANGE", "broken:GOOD"]
        return {value: EntryPoint(value, value, group) for value in targets}

    module: Any = ModuleType("broken")
    module.STRANGE = {"a": "no colour", "b": ["red"], "c": None}
    module.GOOD = {"d": "red"}
    monkeypatch.setitem(sys.modules, "broken", module)
    monkeypatch.setattr(looks, "installed", points)
    assert registered_colours() == {"d": "red"}


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([light(one), light(other)])
    return (high + 0.05) / (low + 0.05)


def test_colours_differ_and_contrast_with_paper() -> None:
    for colour in COLOURS.values():
        assert contrast(colour.light, "#ffffff") >= 3
        assert contrast(colour.dark, "#11151b") >= 3
    assert len({colour.light for colour in COLOURS.values()}) == len(COLOURS)


# Short labels


def test_what_labels_have_in_common_is_left_out() -> None:
    dots = "\N{HORIZONTAL ELLIPSIS}"
    many = [f"SkipKV, tau={tau}, pair=max" for tau in (1, 2)]
    assert short_labels(["H2O", *many]) == (
        "",
        ["H2O", f"SkipKV, tau=1, {dots}", f"SkipKV, tau=2, {dots}"],
    )
    plans = ["runs of today/h2o-64", "runs of today/h2o-128"]
    assert short_labels(plans) == (f"runs of today/h2o-{dots}", [f"{dots}64", f"{dots}128"])
    for few in (["H2O"], ["R-KV", "R-KV, lambda=1"], ["a b", "a c"], []):
        assert short_labels(few) == ("", few)


LABELS = st.lists(st.text("ab, =-", max_size=24), unique=True, max_size=6)


@given(labels=LABELS, prefix=st.sampled_from(["", "a long beginning, ", "name-of-a-plan-file/"]))
def test_short_labels_are_different_and_not_longer(labels: list[str], prefix: str) -> None:
    whole = [prefix + label for label in labels]
    _, short = short_labels(whole)
    assert len(set(short)) == len(whole)
    assert all(len(a) <= len(b) + 1 for a, b in zip(short, whole, strict=True))
