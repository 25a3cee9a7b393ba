"""``kvpolicy reasoner``: sampling problems and evaluating the bundled reasoners."""

import json

import pytest
from kvpolicy_reasoner import REASONERS
from reasoners import WHOLE
from shell import Shell

from kvpolicy.lab.statistics import wilson
from kvpolicy.lab.tasks.task import load_task


@pytest.mark.parametrize("name", REASONERS)
def test_sample_prints_the_problems_of_the_named_task(kvpolicy: Shell, name: str) -> None:
    answer = kvpolicy("reasoner", "sample", "--name", name, "--n", 2, "--json")
    assert answer.status == 0, answer.err
    shown = json.loads(answer.out)
    for problem, item in zip(shown, load_task(name).examples(2, seed=0), strict=True):
        assert problem["prompt"] == item.prompt
        assert problem.keys() == {"prompt", "trace", "answer"} | item.facets.keys()


def test_sample_defaults_to_the_first_reasoner(kvpolicy: Shell) -> None:
    named = kvpolicy("reasoner", "sample", "--name", "reasoner")
    assert kvpolicy("reasoner", "sample").out == named.out


@pytest.mark.nightly
@pytest.mark.parametrize("name", WHOLE)
def test_evaluate_uses_the_named_weights(kvpolicy: Shell, name: str) -> None:
    answer = kvpolicy("reasoner", "evaluate", "--name", name, "--n", 4, "--json")
    assert answer.status == 0, answer.err
    found = json.loads(answer.out)
    assert found["n"] == 4
    assert found["right"] >= 3
    for one in (found, *found["by_depth"]):
        share = wilson(one["right"], one["n"])
        ends = [one[name] for name in ("accuracy", "accuracy_low", "accuracy_high")]
        assert ends == [share.value, share.low, share.high]


@pytest.mark.nightly
def test_evaluate_prints_confidence_intervals(kvpolicy: Shell) -> None:
    head, _, *rows, last, _ = kvpolicy("reasoner", "evaluate", "--n", 4).out.splitlines()
    assert head.split() == ["depth", "n", "right", "accuracy", "95", "%", "CI"]
    assert rows
    share = wilson(int(last.split()[2]), 4)
    assert last.split()[3:] == [
        f"{share.value:.1%}",
        f"{100 * share.low:.1f}-{100 * share.high:.1f}%",
    ]


@pytest.mark.parametrize(
    "args", [("--name", "reasonr"), ("--name", "reasoner-verbose", "--depth", 7)]
)
def test_unknown_name_or_depth_gives_a_one_line_error(kvpolicy: Shell, args) -> None:
    answer = kvpolicy("reasoner", "sample", *args)
    assert answer.status == 2
    assert len(answer.err.splitlines()) == 1
