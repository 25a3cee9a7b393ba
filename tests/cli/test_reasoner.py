"""``kvpolicy reasoner``: one command for each of the bundled reasoners."""

import json

import pytest
from shell import Shell

from kvpolicy.lab.reasoner.bundled import BUNDLED
from kvpolicy.lab.tasks import load_task


@pytest.mark.parametrize("name", BUNDLED)
def test_sample_shows_the_problems_of_the_task_of_that_name(kvpolicy: Shell, name: str) -> None:
    answer = kvpolicy("reasoner", "sample", "--name", name, "--n", 2, "--json")
    assert answer.status == 0, answer.err
    shown = json.loads(answer.out)
    for problem, item in zip(shown, load_task(name).items(2, seed=0), strict=True):
        assert problem["prompt"] == item.prompt
        assert problem.keys() == {"prompt", "trace", "answer"} | item.facets.keys()


def test_the_first_reasoner_is_meant_if_none_is_named(kvpolicy: Shell) -> None:
    named = kvpolicy("reasoner", "sample", "--name", "reasoner")
    assert kvpolicy("reasoner", "sample").out == named.out


@pytest.mark.parametrize("name", BUNDLED)
def test_evaluate_answers_with_the_weights_of_that_name(kvpolicy: Shell, name: str) -> None:
    answer = kvpolicy("reasoner", "evaluate", "--name", name, "--n", 4, "--json")
    assert answer.status == 0, answer.err
    assert json.loads(answer.out)["right"] >= 3


@pytest.mark.parametrize(
    "words", [("--name", "reasonr"), ("--name", "reasoner-verbose", "--depth", 7)]
)
def test_what_there_is_not_is_refused_with_one_sentence(kvpolicy: Shell, words) -> None:
    answer = kvpolicy("reasoner", "sample", *words)
    assert answer.status == 2
    assert len(answer.err.splitlines()) == 1
