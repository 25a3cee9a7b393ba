"""Programs that a model wrote: right and wrong."""

import json
import sys
from pathlib import Path

import pytest
from datafiles import LIVECODEBENCH, pack, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import TaskError
from kvpolicy.lab.sandbox import run
from kvpolicy.lab.tasks.answers import extract_code
from kvpolicy.lab.tasks.code_grading import Test, passes, same_output
from kvpolicy.lab.tasks.livecodebench import unpack
from kvpolicy.lab.tasks.task import GradeError, load_task

in_sandbox = pytest.mark.usefixtures("any_wall")

SUM = "while True:\n    try: print(sum(map(int, input().split())))\n    except EOFError: break\n"
TWO_SUM = """class Solution:
    def twoSum(self, nums: List[int], s: int):
        print("looking")
        places = defaultdict(list)
        for i, n in enumerate(nums):
            if places[s - n]:
                return [places[s - n][0], i]
            places[n].append(i)
"""
BRACKETS = "print('\\n<<answer>>' + '[' * 100_000)"


def fenced(program: str) -> str:
    return f"<think>hm\n```python\nprint('not this')\n```\n</think>\nSo:\n```python\n{program}```\n"


@pytest.mark.few(5)
@in_sandbox
@pytest.mark.parametrize(
    ("number", "text", "right"),
    [
        (0, fenced(SUM), True),
        (0, fenced(SUM) + "\n```python\nprint(3)\n```\n", False),  # the last block counts
        (0, fenced(SUM.replace("sum", "max")), False),
        (0, fenced("print(3)\n"), False),  # the public test alone
        (0, fenced(SUM + "exit(1)\n"), False),
        (0, fenced("def broken(:\n"), False),
        (0, SUM, False),  # no block
        (0, f"```python\n{SUM}", False),  # truncated
        (1, fenced(TWO_SUM), True),
        (1, fenced(TWO_SUM.replace("[0], i]", "[0], i + 1]")), False),
        (1, fenced(TWO_SUM.replace("looking", "<<answer>>[7, 7]")), True),  # its own mark is last
        (1, fenced("def twoSum(a, s):\n    return [0, 1]\n"), True),
        (1, fenced(f"def twoSum(a, s):\n    {BRACKETS}\n    exit()\n"), False),
        (1, fenced("def sumTwo(a, s):\n    return [0, 1]\n"), False),
        (1, fenced(TWO_SUM.replace("return [", "return {*[").replace(", i]", ", i]}")), False),
    ],
)
def test_a_program_is_correct_if_it_passes_all_tests(
    tmp_path: Path, number: int, text: str, right: bool
) -> None:
    file = write_jsonl(tmp_path / "test.jsonl", LIVECODEBENCH[number : number + 1])
    task = load_task(f"livecodebench:source={file}")
    assert task.metric.runs_code
    (item,) = task.examples(1, seed=0)
    assert task.grade(text, item) is right


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("3\n", "3", True),
        ("  3 \n4\n\n", "3\n4", True),
        ("1.0 2", "1 2.00", True),
        ("0.10000001", "0.1", False),
        ("3", "3\n4", False),
        ("3 4", "3\n4", False),
        ("yes", "YES", False),
        ("a  b", "a b", False),
        ("", "", True),
        ("nan", "nan", True),
        ("sNaN", "3", False),
        ("3", "sNaN", False),
    ],
)
def test_outputs_are_compared_line_by_line(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected) is same


@given(st.lists(st.fixed_dictionaries({"input": st.text(), "output": st.text()}), max_size=4))
def test_packed_tests_are_read_back_without_unpickling(tests: list[dict[str, str]]) -> None:
    assert unpack(pack(tests)) == tests
    assert unpack(json.dumps(tests)) == tests


def test_a_problem_without_tests_is_refused(tmp_path: Path) -> None:
    """Every program would pass."""
    none = {"public_test_cases": "[]", "private_test_cases": "[]"}
    path = write_jsonl(tmp_path / "problems.jsonl", [LIVECODEBENCH[0] | none])
    with pytest.raises(TaskError, match="abc001_a"):
        load_task(f"livecodebench:source={path}").examples(1, seed=0)


def test_a_malicious_pickle_is_not_executed(tmp_path: Path) -> None:
    import base64
    import zlib

    trap = tmp_path / "sprung"
    # cos\nsystem\n: unpickling it would make a file.
    pickled = f"cos\nsystem\n(V/bin/touch {trap}\ntR.".encode()
    with pytest.raises(ValueError, match="pickle"):
        unpack(base64.b64encode(zlib.compress(pickled)).decode())
    assert not trap.exists()


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\n```py\nb\n```", "b\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\na\n", None),
        ("no code", None),
    ],
)
def test_the_last_closed_block_counts(text: str, block: str | None) -> None:
    assert extract_code(text) == block


@in_sandbox
def test_a_program_may_ignore_its_input() -> None:
    assert passes("print(1)", [Test("1\n" * 10**6, "1")], time_s=20)


def test_programs_are_refused_without_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.find_wall.cache_clear()
    monkeypatch.setattr(sys, "platform", "plan9")
    with pytest.raises(TaskError, match="Linux"):
        _ = load_task(f"livecodebench:source={tmp_path}").metric


def test_a_program_that_cannot_be_started_has_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        msg = "the sandbox did not start a program"
        raise TaskError(msg)

    monkeypatch.setattr(run, "find_wall", fail)
    file = write_jsonl(tmp_path / "test.jsonl", LIVECODEBENCH[:1])
    task = load_task(f"livecodebench:source={file}")
    (item,) = task.examples(1, seed=0)
    with pytest.raises(GradeError, match="did not start"):
        task.grade(fenced(SUM), item)
