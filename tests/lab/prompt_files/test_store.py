"""Answers on disk: none lost, none doubled, wherever the journal was cut; then all in order."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import OutputError, ResultsError
from kvpolicy.lab.prompt_files.store import AnswerStore, check_output
from kvpolicy.lab.store.jsonl import lock_folder

RUN = {"prompts": "abc", "number of prompts": 6, "seed": 0}
NUM = 6
TEXTS = ["a\u2028", "ü\ud800", "", "\n", "x" * 50, "{"]


def answer(number: int) -> dict[str, Any]:
    return {
        "id": f"q{number}",
        "text": TEXTS[number],
        "finish_reason": "stop" if number else "error",
    }


def opened(output: Path, run: dict[str, Any] = RUN, **options: Any) -> AnswerStore:
    return AnswerStore(output, run, NUM, **options)


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]


def answer_all(output: Path, order: list[int], run: dict[str, Any] = RUN, **options: Any) -> None:
    with opened(output, run, **options) as store:
        left = set(store.left())
        for number in order:
            if number in left:
                store.add([(number, answer(number))])
        store.publish()


WHOLE = [answer(number) for number in range(NUM)]


@given(order=st.permutations(range(NUM)))
def test_answers_in_any_order_are_written_in_the_order_of_the_prompts(
    order: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    output = tmp_path_factory.mktemp("out") / "a.jsonl"
    answer_all(output, order)
    assert read(output) == WHOLE
    assert not (output.parent / "a.jsonl.run/answers.jsonl").exists()


@pytest.mark.skipif(os.name == "nt", reason="needs modes")
def test_answers_that_are_kept_are_for_this_user_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        answer_all(tmp_path / "a.jsonl", [*range(NUM)])
    finally:
        os.umask(umask)
    assert (tmp_path / "a.jsonl.run").stat().st_mode & 0o777 == 0o700


def test_cut_anywhere_no_answer_is_lost_and_none_doubled(tmp_path: Path) -> None:
    order = list(range(NUM))
    random.Random(0).shuffle(order)
    with opened(tmp_path / "a.jsonl") as store:
        store.add((number, answer(number)) for number in order)
    journal = tmp_path / "a.jsonl.run" / "answers.jsonl"
    content = journal.read_bytes()
    breaks = [at for at, byte in enumerate(content) if byte == ord("\n")]
    around = {at + near for at in breaks for near in (-1, 0, 1, 2)} & {*range(len(content) + 1)}
    for end in sorted(around | {*range(0, len(content), 11)}):
        journal.write_bytes(content[:end])
        with opened(tmp_path / "a.jsonl") as store:
            whole = content[:end].count(b"\n")
            assert set(store.left()) == set(order[whole:])
            assert store.num_answered == whole
            assert bool(store.notes) == (end > 0 and content[end - 1 : end] != b"\n")
            for number in store.left():
                store.add([(number, answer(number))])
        numbers = [json.loads(line)["index"] for line in journal.read_bytes().split(b"\n")[:-1]]
        assert sorted(numbers) == list(range(NUM)), "each once"
        with opened(tmp_path / "a.jsonl") as store:
            assert store.num_answered == NUM
            store.publish()
            assert store.reasons == {"stop": NUM - 1, "error": 1}
        assert read(tmp_path / "a.jsonl") == WHOLE
        (tmp_path / "a.jsonl").unlink()


def test_an_answer_that_comes_twice_is_stored_once(tmp_path: Path) -> None:
    with opened(tmp_path / "a.jsonl") as store:
        store.add([(1, answer(1))])
        store.add([(1, answer(2)), (3, answer(3)), (3, answer(3))])
        assert store.num_answered == 2
        assert [*store.left()] == [0, 2, 4, 5]


def test_a_kill_between_the_output_and_the_end_of_the_journal(tmp_path: Path) -> None:
    output, journal = tmp_path / "a.jsonl", tmp_path / "a.jsonl.run" / "answers.jsonl"
    with opened(output) as store:
        store.add((number, answer(number)) for number in range(NUM))
    kept = journal.read_bytes()
    answer_all(output, [])
    journal.write_bytes(kept)
    with opened(output) as store:
        assert (store.is_complete, store.num_answered) == (False, NUM)
        store.publish()
    assert read(output) == WHOLE
    assert not journal.exists()


def test_a_complete_output_is_known_and_its_reasons_are_counted(tmp_path: Path) -> None:
    answer_all(tmp_path / "a.jsonl", [*range(NUM)])
    before = (tmp_path / "a.jsonl").stat()  # of which the time of access may change
    with opened(tmp_path / "a.jsonl") as store:
        assert store.is_complete
        assert not store.left()
        store.publish()
        assert store.reasons == {"stop": NUM - 1, "error": 1}
    after = (tmp_path / "a.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_answers_that_show_nothing_are_counted_now_and_when_they_are_read_again(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out.jsonl"
    texts = ["4", "", " \n", None]
    with AnswerStore(output, RUN, 5) as store:
        store.add((i, {"text": text, "finish_reason": "stop"}) for i, text in enumerate(texts))
        assert store.num_empty == 3
    with AnswerStore(output, RUN, 5) as store:
        assert store.num_empty == 3
        store.add([(4, {"text": None, "finish_reason": "error"})])
        store.publish()
    with AnswerStore(output, RUN, 5) as store:
        assert store.num_empty == 3, "one that failed has an error instead"


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    with opened(output) as store:
        store.add([(0, answer(0))])
    other = RUN | {"seed": 1, "stop": ["a"]}
    with pytest.raises(OutputError, match=r"seed.*stop.*--overwrite"):
        opened(output, other)
    with opened(output) as store:
        assert store.num_answered == 1, "nothing was changed"
    with opened(output, other, overwrite=True) as store:
        assert store.num_answered == 0
        store.add([(1, answer(1))])
    with opened(output, other, overwrite=True) as store:
        assert store.num_answered == 1, "the same run goes on"


def test_overwriting_keeps_a_complete_output_until_the_new_one_is_complete(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    answer_all(output, [*range(NUM)])
    with opened(output, overwrite=True) as store:
        assert store.num_answered == 0
    assert read(output) == WHOLE
    answer_all(output, [5, 4, 3, 2, 1, 0])
    assert read(output) == WHOLE


def test_a_file_of_somebody_else_is_kept_without_overwrite(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    output.write_text("mine")
    with pytest.raises(OutputError, match="--overwrite"):
        opened(output)
    assert output.read_text() == "mine"
    assert not (tmp_path / "a.jsonl.run").exists()
    answer_all(output, [*range(NUM)], overwrite=True)
    assert read(output) == WHOLE


@pytest.mark.parametrize("content", ["", "x\n", '{"id": 1}\n'], ids=["empty", "text", "short"])
def test_an_output_that_was_changed_is_refused(tmp_path: Path, content: str) -> None:
    answer_all(tmp_path / "a.jsonl", [*range(NUM)])
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(OutputError, match=r"a\.jsonl"):
        opened(tmp_path / "a.jsonl")


@pytest.mark.parametrize("line", ["[]", "{}", '{"index": 6}', '{"index": true}', "\0\0\0"])
def test_a_damaged_line_of_the_journal_is_named(tmp_path: Path, line: str) -> None:
    with opened(tmp_path / "a.jsonl") as store:
        store.add([(0, answer(0))])
    path = tmp_path / "a.jsonl.run" / "answers.jsonl"
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(ResultsError, match=r"answers\.jsonl"):
        opened(tmp_path / "a.jsonl")


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 9, "run": {}, "sessions": []}'])
def test_a_damaged_manifest_is_refused_and_can_be_overwritten(tmp_path: Path, content: str) -> None:
    with opened(tmp_path / "a.jsonl") as store:
        store.add([(0, answer(0))])
    (tmp_path / "a.jsonl.run" / "manifest.json").write_text(content)
    with pytest.raises(ResultsError, match=r"manifest\.json"):
        opened(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.run" / "manifest.json").unlink()
    with pytest.raises(OutputError, match=r"manifest\.json"):
        opened(tmp_path / "a.jsonl")
    with opened(tmp_path / "a.jsonl", overwrite=True) as store:
        assert store.num_answered == 0


def test_two_processes_cannot_write_the_same_answers(tmp_path: Path) -> None:
    with opened(tmp_path / "a.jsonl"), pytest.raises(OutputError, match=r"a\.jsonl"):
        opened(tmp_path / "a.jsonl")
    lock_folder(tmp_path / "a.jsonl.run").release()
    with opened(tmp_path / "a.jsonl"), opened(tmp_path / "b.jsonl"):
        pass


def test_outputs_that_can_never_be_written_are_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("x")
    (tmp_path / "taken.run").touch()
    (tmp_path / "link").symlink_to("gone/a.jsonl")
    refused = {
        prompts: "p.jsonl",
        tmp_path: str(tmp_path),
        Path("/dev/null"): "/dev/null",
        tmp_path / "none" / "a": f"{tmp_path}/none",
        prompts / "a": f"{prompts}",
        tmp_path / "taken": "taken.run",
        tmp_path / "link": f"{tmp_path}/gone",
        tmp_path / ("x" * 300): "xxx",
        Path("/proc/a"): "/proc/a",
    }
    for output, named in refused.items():
        with pytest.raises(OutputError, match="--output") as caught:
            check_output(output, str(prompts))
        assert named in str(caught.value)
    check_output(tmp_path / "a.jsonl", str(prompts))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "p.jsonl", "taken.run"]
