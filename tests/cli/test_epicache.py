"""`kvpolicy epicache`: a store is built, asked and measured; mistakes are one sentence."""

import json
import tomllib
from pathlib import Path

import pytest
from shell import Shell

pytestmark = pytest.mark.needs_reasoner

SMALL = ("--budget", 48, "--buffer", 64, "--window", 2, "--instruction", "")


@pytest.fixture
def store(kvpolicy: Shell, tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    made = kvpolicy("epicache", "build", "conversation", "--output", folder, *SMALL)
    assert made.status == 0, made.err
    assert made.out.split()[:2] == ["episode", "windows"]
    assert "where a full cache has" in made.err
    return folder


@pytest.mark.nightly
def test_a_store_answers_questions(kvpolicy: Shell, store: Path) -> None:
    text = kvpolicy("epicache", "ask", store, " What is fig?", "--max-new-tokens", 30)
    assert text.status == 0, text.err
    plain = kvpolicy("epicache", "ask", store, " What is fig?", "--max-new-tokens", 30, "--json")
    (answer,) = plain.json
    assert text.out.startswith(f"[episode {answer['episode']}] What is fig?\n{answer['text']}")
    assert answer["error"] is None


@pytest.mark.nightly
def test_building_again_is_for_machines_too(kvpolicy: Shell, store: Path) -> None:
    words = ("--conversation", 1, "--episodes", 2, "--output", store, "--json")
    made = kvpolicy("epicache", "build", "conversation", *SMALL, *words)
    assert made.status == 0, made.err
    assert len(made.json["episodes"]) == 2
    assert made.json["peak_bytes"] < made.json["full_bytes"]
    assert {one["rows"] for one in made.json["episodes"]} == {48}


@pytest.mark.nightly
def test_evaluation_has_all_three_ways(kvpolicy: Shell) -> None:
    words = ("--n", 2, "--max-new-tokens", 40)
    done = kvpolicy("epicache", "evaluate", "conversation:questions=4", *SMALL, *words, "--json")
    assert done.status == 0, done.err
    names = [one["name"] for one in done.json["caches"]]
    assert names == ["4 episodes", "one cache", "full cache"]
    assert done.json["questions"] == 8
    shares = {name: sum(map(sum, given)) / 8 for name, given in done.json["answers"].items()}
    for one in done.json["caches"]:
        assert one["accuracy"]["value"] == shares[one["name"]]
    episodes, single, full = done.json["caches"]
    assert episodes["prefill_bytes"] == single["prefill_bytes"] < full["prefill_bytes"]
    assert episodes["host_bytes"] == 4 * single["host_bytes"]
    for one in done.json["differences"]:
        assert one["difference"]["value"] == shares["4 episodes"] - shares[one["from"]]
    text = kvpolicy("epicache", "evaluate", "conversation:questions=4", *SMALL, *words)
    assert "4 episodes minus one cache: " in text.out
    assert "8 questions about 2 conversations" in text.err


@pytest.mark.nightly
def test_one_conversation_has_no_intervals(kvpolicy: Shell, tmp_path: Path) -> None:
    talk = {
        "utterances": [" wax is 9.", " tea = wax + 4.", " oak is 3.", " pine = oak + 1."],
        "questions": [{"question": " What is tea?", "answer": "13"}],
    }
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps(talk) + "\n")
    done = kvpolicy("epicache", "evaluate", file, *SMALL, "--n", 1, "--max-new-tokens", 2)
    assert done.status == 0, done.err
    assert "%" in done.out
    assert "[" not in done.out
    assert "--n" in done.err


def test_conversations_of_a_file(kvpolicy: Shell, tmp_path: Path) -> None:
    talk = {
        "utterances": [" wax is 9.", " tea = wax + 4.", " oak is 3.", " pine = oak + 1."],
        "questions": [{"question": " What is tea?", "answer": "13"}],
    }
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps(talk) + "\n")
    words = ("epicache", "build", file, *SMALL, "--json", "--output")
    made = kvpolicy(*words, tmp_path / "s")
    assert made.status == 0, made.err
    assert len(made.json["episodes"]) == 2, "of as many windows"
    assert "--raw" in made.err, "the chat template was applied"
    raw = kvpolicy(*words, tmp_path / "raw", "--raw")
    assert raw.json["tokens"] < made.json["tokens"]
    assert "chat template" not in raw.err


def test_the_plan_may_have_a_share_for_a_budget_and_a_policy_of_a_file(
    kvpolicy: Shell, tmp_path: Path
) -> None:
    file, plugin = tmp_path / "talk.jsonl", tmp_path / "mine.py"
    talk = {"utterances": [" wax is 9."], "questions": [{"question": " And?", "answer": "9"}]}
    file.write_text(json.dumps(talk) + "\n")
    plugin.write_text(
        "from kvpolicy import hookimpl\n\n\nclass Twice:\n    @hookimpl(wrapper=True)\n"
        "    def score(self):\n        return 2 * (yield)\n"
    )
    words = ("--budget", "25%", "--length", 80, "--plugin", plugin, "--policy", "epicache+twice")
    made = kvpolicy("epicache", "build", file, "--raw", *words, "--output", tmp_path / "store")
    assert made.status == 0, made.err
    plan = tomllib.loads((tmp_path / "store" / "plan.toml").read_text())
    assert "twice" in str(plan)
    budgets = {plan.get("budget"), *(one.get("budget") for one in plan.get("layers", []))}
    assert budgets - {None} == {20}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("build", "multikey", "--budget", 40), "has no conversations"),
        (("build", "conversation"), "give --budget N"),
        (("build", "conversation", "--policy", "h2o", "--budget", 40), "no policy 'epicache'"),
        (("build", "conversation", "--budget", 40, "--raw"), "--raw is for files"),
        (("build", "nothing.jsonl", "--budget", 40), "nothing.jsonl"),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else value,
)
def test_mistakes_are_one_sentence(
    kvpolicy: Shell, tmp_path: Path, words: tuple[object, ...], problem: str
) -> None:
    answer = kvpolicy("epicache", *words, "--output", tmp_path / "new")
    assert answer.status != 0
    assert problem in answer.err
    assert "Traceback" not in answer.err
    assert not (tmp_path / "new").exists()


def test_a_folder_without_a_store_is_refused(kvpolicy: Shell, tmp_path: Path) -> None:
    answer = kvpolicy("epicache", "ask", tmp_path, "what?")
    assert answer.status != 0
    assert "holds no store" in answer.err
