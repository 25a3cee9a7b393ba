"""How a cell is measured: what is asked of the engine, and what its table says of the answers.

A task says how its cells are measured by giving a `Measure`. Sweeps, stores, tables and plots
know nothing else of it: a graded answer, a perplexity and the agreement with another cache are
treated alike.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs

from kvpolicy.engine.results import Result
from kvpolicy.errors import KVPolicyError, TaskError
from kvpolicy.lab.statistics import Estimate, mean, pass_at_1
from kvpolicy.lab.store.records import Sample

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine
    from kvpolicy.engine.request import Request
    from kvpolicy.engine.run import Run
    from kvpolicy.lab.tasks.task import Item, Task


Value = TypeVar("Value")


class GradeError(KVPolicyError):
    """A grader has no verdict on a text; the sample is kept, counted apart and not right."""


@attrs.frozen
class Column:
    """One quantity that a table says of a cell.

    Attributes:
        name: Its name in files.
        title: What tables call it, in a word or two.
        heading: What plots call it, with its unit.
        value: The quantity of one sample; ``None`` where it has none, because it failed.
        estimate: The quantity of a cell with its interval; ``None`` if no sample has one.
        is_share: Whether it lies between 0 and 1 and reads best in percent.
        parts: What a sample adds to each of the two sums whose ratio the quantity of a cell is,
            or ``None``; not given where the quantity of a cell is the mean over its items.
        of_ratio: What the quantity is of that ratio, such as its exponential.
    """

    name: str
    title: str
    heading: str
    value: Callable[[Sample], float | None]
    estimate: Callable[[Sequence[Sample]], Estimate | None]
    is_share: bool = False
    parts: Callable[[Sample], tuple[float, float] | None] | None = None
    of_ratio: Callable[[float], float] = float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the manifest."""
        return {
            "name": self.name,
            "title": self.title,
            "heading": self.heading,
            "is_share": self.is_share,
        }

    def words(self, value: float) -> str:
        """One value, in words."""
        return f"{value:.0%}" if self.is_share else f"{value:.4g}"


@attrs.frozen
class Asked:
    """One item, and the request that a model is given for it."""

    item: "Item"
    request: "Request"


@attrs.frozen
class Outcome:
    """What became of one item.

    Attributes:
        result: What the engine answered.
        correct: The grader's verdict; ``None`` if nothing is graded, or it has none.
        values: What was measured, by name.
        problem: Why a grader has no verdict, if it has none.
    """

    result: Result
    correct: bool | None = None
    values: Mapping[str, float] = attrs.field(factory=dict)
    problem: str | None = None


class Trial(Protocol):
    """Items being measured under one plan."""

    @property
    def run(self) -> "Run":
        """Gives results as they finish; request ``i`` is the ``i``-th of what was asked."""

    def outcome(self, result: Result) -> Outcome:
        """What a finished result comes to."""


class Measure(Protocol):
    """A way to measure cells."""

    @property
    def name(self) -> str:
        """What is measured: one word, part of the name of every stored sample."""

    @property
    def columns(self) -> Sequence[Column]:
        """What tables say; the first is plotted, and compared between cells."""

    @property
    def reads_reference(self) -> bool:
        """Whether outcomes depend on the items' reference texts as well as on their prompts."""

    @property
    def runs_code(self) -> bool:
        """Whether programs written by a model are run, which a user has to allow."""

    def begin(self, engine: "Engine", asked: Sequence[Asked]) -> Trial:
        """Begin to measure items; nothing is computed before the run is iterated over."""


@attrs.frozen
class Graded:
    """Let the model answer, and have a grader tell right from wrong.

    Attributes:
        grade: Tells whether a text answers an item; raises `GradeError` if it cannot tell.
        runs_code: Whether it runs what the model wrote.
    """

    grade: "Callable[[str, Item], bool]"
    runs_code: bool = False
    name: str = attrs.field(default="answers", init=False)
    reads_reference: bool = attrs.field(default=False, init=False)

    @property
    def columns(self) -> Sequence[Column]:
        """The share of right answers: pass@1 where each question is asked several times."""
        return (ACCURACY,)

    def begin(self, engine: "Engine", asked: Sequence[Asked]) -> Trial:
        """Generate."""
        run = engine.generate([one.request for one in asked])
        return _GradedTrial(run, self.grade, [one.item for one in asked])


@attrs.frozen
class _GradedTrial:
    run: "Run"
    grade: "Callable[[str, Item], bool]"
    items: "Sequence[Item]"

    def outcome(self, result: Result) -> Outcome:
        if result.finish_reason == "error":
            return Outcome(result, correct=False)
        try:
            return Outcome(result, self.grade(result.text or "", self.items[result.id]))
        except GradeError as error:
            return Outcome(result, problem=str(error))


def mean_of(name: str, title: str, heading: str, *, is_share: bool = False) -> Column:
    """A column for the mean, over items, of something that is measured of each sample.

    Args:
        name: Its name among the values of an outcome.
        title: What tables call it.
        heading: What plots call it.
        is_share: Whether it reads best in percent.
    """
    return _mean_column(name, title, heading, lambda one: one.values.get(name), is_share)


def _mean_column(
    name: str,
    title: str,
    heading: str,
    value: Callable[[Sample], float | None],
    is_share: bool = False,
) -> Column:
    def estimate(samples: Sequence[Sample]) -> Estimate | None:
        found = by_item(samples, value)
        return mean([fmean(values) for values in found]) if found else None

    return Column(name, title, heading, value, estimate, is_share)


def by_item(
    samples: Sequence[Sample], value: Callable[[Sample], Value | None]
) -> list[list[Value]]:
    """What samples say, together for each item: attempts at one are alike.

    Args:
        samples: The samples.
        value: What one says; ``None`` if nothing.
    """
    found: dict[int, list[Value]] = {}
    for sample in samples:
        said = value(sample)
        if said is not None:
            found.setdefault(sample.item, []).append(said)
    return list(found.values())


def _share_right(samples: Sequence[Sample]) -> Estimate | None:
    attempts = by_item(samples, lambda sample: bool(sample.correct))
    return pass_at_1(attempts) if attempts else None


def _is_right(sample: Sample) -> float:
    return float(bool(sample.correct))


def _num_tokens(sample: Sample) -> float | None:
    return None if sample.finish_reason == "error" else float(sample.num_tokens)


LENGTH = _mean_column("length", "tokens", "Generated tokens", _num_tokens)
ACCURACY = Column("accuracy", "right", "Accuracy", _is_right, _share_right, is_share=True)


def grader_of(task: "Task") -> "Callable[[str, Item], bool]":
    """The grader of a task, for those who need answers and not just any measure.

    Args:
        task: The task.

    Raises:
        TaskError: It measures something else, or its grader would run what the model wrote.
    """
    if not isinstance(task.measure, Graded) or task.measure.runs_code:
        msg = f"task '{task.name}' has no grader that tells right answers by their text alone"
        raise TaskError(msg)
    return task.measure.grade
