"""Grading mathematics: a table of traps, and a grader that cannot be hung or confused."""

import os
import signal

import pytest

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks import datasets as rows
from kvpolicy.lab.tasks.math_grading import Worker, grade_math
from kvpolicy.lab.tasks.task import Example, GradeError, load_task

pytest.importorskip("math_verify", reason="the extra 'tasks' is not installed")

# What the box holds, the answer of the data set, whether they mean the same.
TABLE = [
    # The one that cut-at-the-first-brace graders get wrong, and its ways of being written.
    (r"\frac{1}{2}", r"\frac{1}{2}", True),
    (r"\dfrac12", r"\frac{1}{2}", True),
    ("0.5", r"\frac{1}{2}", True),
    ("1/2", r"\frac12", True),
    (r"\frac{1}{3}", r"\frac{1}{2}", False),
    (r"\frac{2}{1}", r"\frac{1}{2}", False),
    # Thousands
    ("1,000", "1000", True),
    (r"1{,}000", "1000", True),
    (r"1\,000", "1000", True),
    (r"10,\!236", "10236", True),
    ("1,001", "1000", False),
    ("100", "1000", False),
    # Units, signs, decorations
    (r"\$18", "18", True),
    (r"18\text{ apples}", "18", True),
    ("18.0", "18", True),
    ("18.5", "18", False),
    ("-18", "18", False),
    (r"90^\circ", "90", True),
    (r"50\%", "50", True),
    ("x=5", "5", True),
    # AIME writes 24 as 024
    ("024", "24", True),
    ("204", "24", False),
    # Tuples, intervals, sets
    (r"\left(3,\frac{\pi}{2}\right)", r"\left( 3, \frac{\pi}{2} \right)", True),
    (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)", True),
    (r"\left(\frac{\pi}{2},3\right)", r"\left( 3, \frac{\pi}{2} \right)", False),
    ("(0,1)", "[0,1)", False),
    (r"\{3,4\}", "4", False),
    ("3, 4", "4", False),
    # Expressions
    (r"\sqrt{117}", r"3\sqrt{13}", True),
    ("q-p", "p-q", False),
    (r"2^{10}", "1024", True),
    ("6 - 5i", "6-5i", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
    (r"\pi", "3.14", False),
    # Words
    ("Evelyn", r"\text{Evelyn}", True),
    (r"\text{(C)}", "C", True),
    (r"\text{even}", r"\text{odd}", False),
    # What is no answer
    ("", "5", False),
    (r"\frac{1}{", "5", False),
    ("?", "5", False),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("box", "answer", "same"), TABLE)
def test_equivalent_answers_are_equal(box: str, answer: str, same: bool) -> None:
    assert grade_math(box, answer) is same


# Whole texts: which box counts.
TEXTS = [
    (r"I think \boxed{3}. Wait, no: \boxed{4}", "4", True),
    (r"I think \boxed{4}. Wait, no: \boxed{3}", "4", False),
    (r"<think>\boxed{7}</think> So \boxed{\frac{1}{2}}.", r"\frac{1}{2}", True),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", True),
    (r"\boxed{4} and then it goes on \boxed{5", "4", True),
    (r"the answer is 4", "4", False),
    (r"#### 4", "4", False),
    ("", "4", False),
]


@pytest.mark.parametrize(("text", "answer", "right"), TEXTS)
def test_only_the_last_balanced_box_counts(text: str, answer: str, right: bool) -> None:
    task = load_task("gsm8k")
    assert task.grade(text, Example(0, "", answer)) is right


def test_an_exact_grader_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: str) -> bool:
        pytest.fail("mathematics was asked")

    monkeypatch.setattr("kvpolicy.lab.tasks.question_sets.grade_math", ask)
    task = load_task("questions:source=any.jsonl,grader=exact")
    assert task.grade(r"\boxed{ 0.5 }", Example(0, "", "0.5"))
    assert not task.grade(r"\boxed{0.50}", Example(0, "", "0.5"))


def test_a_question_without_an_answer_has_no_verdict() -> None:
    task = load_task("questions:source=any.jsonl,grader=exact")
    with pytest.raises(GradeError, match="question 3"):
        task.grade(r"\boxed{}", Example(3, "", ""))


@pytest.mark.nightly
def test_an_answer_that_cannot_be_compared_in_time_has_no_verdict_and_the_next_one_has() -> None:
    worker = Worker(wait_s=60)
    try:
        assert worker.grade("5", "5")
        worker.wait_s = 1  # at any speed: it would take ages
        with pytest.raises(GradeError, match="1 s"):
            worker.grade(r"10^{10^{10^{10}}}", "5")
        worker.wait_s = 60
        assert worker.grade("5", "5")
    finally:
        worker.close()


@pytest.mark.nightly
def test_a_grader_that_was_killed_starts_again() -> None:
    worker = Worker()
    try:
        assert worker.grade("5", "5")
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        assert not worker.grade("4", "5")
    finally:
        worker.close()


def test_a_missing_grading_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda _: None)
    for name in ("gsm8k", "math-500", "aime-24"):
        with pytest.raises(TaskError, match=r"math-verify.*\[tasks\]"):
            _ = load_task(name).metric
    assert load_task("questions:source=any.jsonl,grader=exact").metric
