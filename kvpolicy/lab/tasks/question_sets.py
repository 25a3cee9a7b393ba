"""Question sets from the hub or from files: GSM8K, MATH-500, AIME 2024, and one's own."""

import random
from collections.abc import Callable, Mapping, Sequence

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks import forms
from kvpolicy.lab.tasks.answers import extract_answer
from kvpolicy.lab.tasks.datasets import read_rows, require
from kvpolicy.lab.tasks.forms import Form
from kvpolicy.lab.tasks.math_grading import grade_math
from kvpolicy.lab.tasks.measures import Graded, GradeError
from kvpolicy.lab.tasks.task import Item, Split, spell

MATH = "math"
EXACT = "exact"


@attrs.frozen
class Source:
    """Where questions come from.

    Attributes:
        place: A hub id, a folder or a file.
        config: Configuration of the data set on the hub.
        splits: What the data set calls our splits. A file is always asked as a whole.
    """

    place: str
    config: str | None
    splits: Mapping[Split, str]


@attrs.frozen
class QuestionTask:
    """Questions of a data set, asked in a chat, graded by the last box.

    Attributes:
        family: What the user types.
        source: Where they come from.
        form: In which form; found by the columns if ``None``.
        chat: Whether they are wrapped in the model's chat template.
        grader: ``"math"``: the box and the answer mean the same; ``"exact"``: they are the
            same text.
        usual: Where they come from if the user does not say.
    """

    family: str
    source: Source
    form: Form | None
    chat: bool
    grader: str = attrs.field(default=MATH)
    usual: str = ""

    @grader.validator
    def _check_grader(self, _: object, grader: str) -> None:
        if grader not in (MATH, EXACT):
            msg = f"task '{self.family}' has no grader '{grader}'; there are {MATH} and {EXACT}"
            raise TaskError(msg)

    @property
    def name(self) -> str:
        """What the user types."""
        options = {"source": self.source.place, "chat": self.chat, "grader": self.grader}
        return spell(self.family, options, {"source": self.usual, "chat": True, "grader": MATH})

    @property
    def measure(self) -> Graded:
        """Right answers; raises `TaskError` if the package that grades them is missing."""
        if self.grader == MATH:
            require("math_verify", f"grading {self.family}")
        return Graded(self.grade)

    def items(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Item]:
        """Draw ``n`` questions, all of them if there are fewer, in an order of the seed's own."""
        place = self.source.place
        if split not in self.source.splits:
            have = " and ".join(self.source.splits)
            msg = f"task '{self.name}' has no {split} split; it has {have}"
            raise TaskError(msg)
        rows = read_rows(place, config=self.source.config, split=self.source.splits[split])
        if not len(rows):
            msg = f"'{place}' holds no questions"
            raise TaskError(msg)
        form = self.form or forms.form_of(rows[0], place)
        return [
            attrs.evolve(item, index=index, chat=item.chat and self.chat)
            for index, item in enumerate(
                forms.read(form, rows[row], place) for row in draw(len(rows), n, seed)
            )
        ]

    def grade(self, text: str, item: Item) -> bool:
        """Tell whether the last balanced box of ``text`` holds the answer.

        Raises:
            GradeError: The two could not be compared in time, or there is no answer.
        """
        if not item.answer.strip():
            msg = f"question {item.index} comes without an answer"
            raise GradeError(msg)
        box = extract_answer(text)
        if box is None:
            return False
        if box == item.answer.strip():
            return True
        return self.grader == MATH and grade_math(box, item.answer)


def draw(num_rows: int, n: int, seed: int) -> list[int]:
    """Choose ``n`` of so many rows, or all; the first ``k`` are the answer to ``n=k``."""
    order = list(range(num_rows))
    random.Random(f"rows {seed}").shuffle(order)
    return order[:n]


_Make = Callable[[str, bool], QuestionTask]


def _benchmark(
    family: str, place: str, config: str | None, splits: Mapping[Split, str], form: Form
) -> _Make:
    def make(source: str, chat: bool) -> QuestionTask:
        return QuestionTask(family, Source(source, config, splits), form, chat, usual=place)

    return make


# Ids, configurations and splits as lm-evaluation-harness 0.4.13 has them. The whole of AIME 2024
# is called "train" on the hub; it is what results are reported on.
_GSM8K_ID = "openai/gsm8k"
_MATH_ID = "HuggingFaceH4/MATH-500"
_AIME_ID = "Maxwell-Jia/AIME_2024"
_gsm8k = _benchmark(
    "gsm8k", _GSM8K_ID, "main", {"test": "test", "tune": "train", "train": "train"}, forms.GSM8K
)
_math = _benchmark("math-500", _MATH_ID, None, {"test": "test"}, forms.MATH)
_aime = _benchmark("aime-24", _AIME_ID, None, {"test": "train"}, forms.AIME)


def gsm8k(source: str = _GSM8K_ID, chat: bool = True) -> QuestionTask:
    """Grade-school word problems (2110.14168), 1,319 in the split that is reported on."""
    return _gsm8k(source, chat)


def math_500(source: str = _MATH_ID, chat: bool = True) -> QuestionTask:
    """500 problems of MATH's test split (2305.20050), with levels 1 to 5 and subjects."""
    return _math(source, chat)


def aime_24(source: str = _AIME_ID, chat: bool = True) -> QuestionTask:
    """The 30 problems of AIME I and II of 2024."""
    return _aime(source, chat)


def questions(
    source: str,
    config: str = "",
    split: str = "test",
    chat: bool = True,
    grader: str = MATH,
) -> QuestionTask:
    """Questions of your own: a file or a hub id, whose form is known by its columns."""
    where = Source(source, config or None, {"test": split})
    return QuestionTask("questions", where, None, chat, grader)
