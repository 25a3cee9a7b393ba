"""Question sets from the hub or from files: GSM8K, MATH-500, AIME 2024 and a user's own."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.answers import extract_answer
from kvpolicy.lab.tasks.datasets import read_rows, require
from kvpolicy.lab.tasks.math_grading import grade_math
from kvpolicy.lab.tasks.task import Example, Graded, GradeError, Split, spell

# Graders.
MATH = "math"
EXACT = "exact"

# The instruction that DeepSeek-R1's authors put after a mathematical question.
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@attrs.frozen
class Form:
    """A layout of question sets, recognised by its columns.

    Attributes:
        name: Its name in messages.
        columns: The columns that a data set of this layout has.
        read: Makes an example of a row; the index is filled in later.
    """

    name: str
    columns: frozenset[str]
    read: Callable[[Mapping[str, Any]], Example]


def _read_gsm8k(row: Mapping[str, Any]) -> Example:
    """A word problem: ``question``, and ``answer`` with the number after the last ``####``."""
    solution, marks, number = str(row["answer"]).rpartition("####")
    if not marks:
        msg = f"an answer has no '####' before its number: {row['answer']!r:.60}"
        raise TaskError(msg)
    # In this data set, 1,000 is a thousand and never the pair (1, 000).
    answer = number.strip().replace(",", "")
    # Calculator annotations between angle brackets are not part of the text.
    reference = re.sub(r"<<.*?>>", "", solution).strip()
    steps = len([line for line in solution.splitlines() if line.strip()])
    return _question(row["question"], answer, {"steps": steps}, reference)


def _read_math(row: Mapping[str, Any]) -> Example:
    """A problem of MATH: ``problem``, ``answer``, and mostly ``level`` and ``subject``."""
    facets = {key: row[key] for key in ("level", "subject") if row.get(key) is not None}
    return _question(row["problem"], str(row["answer"]), facets, row.get("solution"))


def _read_aime(row: Mapping[str, Any]) -> Example:
    """A problem of AIME: ``Problem`` and ``Answer``, with an ``ID`` such as ``2024-I-4``."""
    found = re.fullmatch(r"\d+-(I+)-(\d+)", str(row.get("ID", "")))
    facets: dict[str, int | str] = {}
    if found:
        facets = {"paper": found[1], "number": int(found[2])}
    return _question(row["Problem"], str(row["Answer"]), facets, row.get("Solution"))


def _read_plain(row: Mapping[str, Any]) -> Example:
    """A user's own question: ``prompt``, ``answer``; other numbers and short texts are facets."""
    others = {key: value for key, value in row.items() if key not in _PLAIN}
    facets = {k: v for k, v in others.items() if type(v) in (int, str) and len(str(v)) <= 40}
    return Example(
        index=0,
        prompt=str(row["prompt"]),
        answer=str(row.get("answer", "")),
        facets=facets,
        reference=row.get("reference"),
        chat=True,
    )


def _read_text(row: Mapping[str, Any]) -> Example:
    """A text without a question: ``text``."""
    return Example(index=0, prompt="", answer="", reference=str(row["text"]))


_PLAIN = frozenset({"prompt", "answer", "reference"})
_GSM8K = Form("GSM8K", frozenset({"question", "answer"}), _read_gsm8k)
_MATH = Form("MATH", frozenset({"problem", "answer"}), _read_math)
_AIME = Form("AIME", frozenset({"Problem", "Answer"}), _read_aime)
_FORMS = (
    _GSM8K,
    _MATH,
    _AIME,
    Form("plain questions", frozenset({"prompt"}), _read_plain),
    Form("texts", frozenset({"text"}), _read_text),
)


@attrs.frozen
class QuestionSource:
    """Where questions come from.

    Attributes:
        location: A hub id, a folder or a file.
        config: Configuration of the data set on the hub.
        splits: Split names of the data set by ours. A file is always read as a whole.
    """

    location: str
    config: str | None
    splits: Mapping[Split, str]


@attrs.frozen
class QuestionTask:
    """Questions of a data set, asked in a chat, graded by the last box.

    Attributes:
        family: Name of the task.
        source: Where the questions come from.
        form: Their layout; recognised by the columns if ``None``.
        chat: Whether they are wrapped in the model's chat template.
        grader: ``"math"``: the box and the answer mean the same; ``"exact"``: they are the
            same text.
        default_location: The location if the user gives none.
    """

    family: str
    source: QuestionSource
    form: Form | None
    chat: bool
    grader: str = attrs.field(default=MATH)
    default_location: str = ""

    @grader.validator
    def _check_grader(self, _: object, grader: str) -> None:
        if grader not in (MATH, EXACT):
            msg = f"task '{self.family}' has no grader '{grader}'; there are {MATH} and {EXACT}"
            raise TaskError(msg)

    @property
    def name(self) -> str:
        """What the user types."""
        options = {"source": self.source.location, "chat": self.chat, "grader": self.grader}
        defaults = {"source": self.default_location, "chat": True, "grader": MATH}
        return spell(self.family, options, defaults)

    @property
    def metric(self) -> Graded:
        """Accuracy; raises `TaskError` if the package of the grader is missing."""
        if self.grader == MATH:
            require("math_verify", f"grading {self.family}")
        return Graded(self.grade)

    def examples(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        """Draw ``n`` questions, or all if there are fewer, in an order that the seed chooses."""
        location = self.source.location
        if split not in self.source.splits:
            have = " and ".join(self.source.splits)
            msg = f"task '{self.name}' has no {split} split; it has {have}"
            raise TaskError(msg)
        rows = read_rows(location, config=self.source.config, split=self.source.splits[split])
        if not len(rows):
            msg = f"'{location}' holds no questions"
            raise TaskError(msg)
        form = self.form or _form_of(rows[0], location)
        examples = [_read(form, rows[row], location) for row in draw(len(rows), n, seed)]
        return [
            attrs.evolve(example, index=index, chat=example.chat and self.chat)
            for index, example in enumerate(examples)
        ]

    def grade(self, text: str, example: Example) -> bool:
        """Whether the last balanced box of ``text`` holds the answer.

        Raises:
            GradeError: The two could not be compared in time, or there is no answer.
        """
        if not example.answer.strip():
            msg = f"question {example.index} comes without an answer"
            raise GradeError(msg)
        box = extract_answer(text)
        if box is None:
            return False
        if box == example.answer.strip():
            return True
        return self.grader == MATH and grade_math(box, example.answer)


def draw(num_rows: int, n: int, seed: int) -> list[int]:
    """Draw ``n`` of the rows, or all; the first ``k`` are those that ``n=k`` draws."""
    order = list(range(num_rows))
    random.Random(f"rows {seed}").shuffle(order)
    return order[:n]


# Ids, configurations and splits as in lm-evaluation-harness 0.4.13. AIME 2024 has one split on
# the hub, "train"; results are reported on it.
_GSM8K_ID = "openai/gsm8k"
_MATH_ID = "HuggingFaceH4/MATH-500"
_AIME_ID = "Maxwell-Jia/AIME_2024"


def gsm8k(source: str = _GSM8K_ID, chat: bool = True) -> QuestionTask:
    """Grade-school word problems (2110.14168), 1,319 in the test split."""
    found = QuestionSource(source, "main", {"test": "test", "tune": "train", "train": "train"})
    return QuestionTask("gsm8k", found, _GSM8K, chat, default_location=_GSM8K_ID)


def math_500(source: str = _MATH_ID, chat: bool = True) -> QuestionTask:
    """500 problems of MATH's test split (2305.20050), with levels 1 to 5 and subjects."""
    found = QuestionSource(source, None, {"test": "test"})
    return QuestionTask("math-500", found, _MATH, chat, default_location=_MATH_ID)


def aime_24(source: str = _AIME_ID, chat: bool = True) -> QuestionTask:
    """The 30 problems of AIME I and II of 2024."""
    found = QuestionSource(source, None, {"test": "train"})
    return QuestionTask("aime-24", found, _AIME, chat, default_location=_AIME_ID)


def questions(
    source: str,
    config: str = "",
    split: str = "test",
    chat: bool = True,
    grader: str = MATH,
) -> QuestionTask:
    """Your own questions: a file or a hub id, whose layout is recognised by its columns."""
    found = QuestionSource(source, config or None, {"test": split})
    return QuestionTask("questions", found, None, chat, grader)


def _form_of(row: Mapping[str, Any], location: str) -> Form:
    for form in _FORMS:
        if form.columns <= row.keys():
            return form
    known = "; ".join(f"{', '.join(sorted(form.columns))} ({form.name})" for form in _FORMS)
    msg = f"'{location}' has the columns {', '.join(row)}; known are: {known}"
    raise TaskError(msg)


def _read(form: Form, row: Mapping[str, Any], location: str) -> Example:
    missing = form.columns - row.keys()
    if missing:
        msg = f"'{location}' has no column {', '.join(sorted(missing))}, which {form.name} has"
        raise TaskError(msg)
    try:
        return form.read(row)
    except TaskError as error:
        msg = f"'{location}': {error}"
        raise TaskError(msg) from error


def _question(
    question: object, answer: str, facets: Mapping[str, int | str], reference: object
) -> Example:
    return Example(
        index=0,
        prompt=f"{question}\n\n{INSTRUCTION}",
        answer=answer,
        facets=dict(facets),
        reference=None if reference is None else str(reference),
        chat=True,
    )
