"""Tasks: the examples that a sweep gives a model, and the metric of a cell.

A task is named by what a user types: an installed task, a file or a hub id, with options. An
entry point of the group ``kvpolicy.tasks`` names a function that is called with the options and
returns a `Task`. Only the task that is named is imported.

A metric turns the results of the engine into numbers. Sweeps, stores, tables and plots treat all
metrics equally: graded answers, perplexity and agreement with the full cache.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from statistics import fmean
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

import attrs

from kvpolicy.engine.requests.results import Result
from kvpolicy.entry_points import distribution, installed, load_installed, nearest
from kvpolicy.errors import KVPolicyError, TaskError, refusal_reason
from kvpolicy.lab.shared import Shared
from kvpolicy.lab.statistics import Interval, mean, pass_at_1, ratio
from kvpolicy.lab.store.records import Breakdown, ColumnInfo, Sample
from kvpolicy.plugin_code import plugin_code

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine, Run
    from kvpolicy.engine.requests.request import Request

GROUP = "kvpolicy.tasks"

# The entry point that reads files and hub ids, given as its option ``source``.
QUESTIONS = "questions"

# Suffixes of files that hold examples, and not a text.
_DATA_SETS = (".jsonl", ".json", ".csv", ".parquet")

Split = Literal["train", "tune", "test"]

_Value = TypeVar("_Value")


class GradeError(KVPolicyError):
    """A grader has no verdict on a text; the sample is stored, and counts as not correct."""


@attrs.frozen
class Example:
    """One question of a task.

    Attributes:
        index: Number of the example in its task and seed, from 0.
        prompt: What the model is given.
        answer: The expected answer, in the form that the task's grader reads.
        facets: Properties that a report may group by, such as the difficulty.
        reference: A text that answers the prompt, for metrics that score a given text; ``None``
            if there is none.
        chat: Whether the prompt is a user's message, to be put into the model's chat template
            before it is tokenized.
        attempt: Which attempt at the example this is, from 0.
        message: The user's message, where ``prompt`` is what the chat template made of it.
        system: The system prompt of the chat, if there is one.
    """

    index: int
    prompt: str
    answer: str
    facets: Mapping[str, int | str] = attrs.field(factory=dict)
    reference: str | None = None
    chat: bool = False
    attempt: int = 0
    message: str | None = None
    system: str | None = None


class Task(Protocol):
    """Examples, and the metric of a cell.

    A task whose examples have lengths in tokens of the model also has a method
    ``for_tokenizer(tokenizer)``, see `fitted`.
    """

    @property
    def name(self) -> str:
        """What the user types, with the options that differ from their defaults."""

    @property
    def metric(self) -> "Metric":
        """How a cell is measured: `Graded` for questions with a grader."""

    def examples(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        """Draw ``n`` examples of a split, or all if there are fewer.

        The same arguments give the same examples, and the first ``k`` of them are those of
        ``n=k``. The split is ``"test"`` to report on, ``"tune"`` to choose settings on,
        ``"train"`` to learn from.

        Raises:
            TaskError: The task has no such split.
        """


@attrs.frozen
class Column:
    """One quantity that tables and plots show of a cell.

    Attributes:
        name: Its name in files.
        title: Its short name in tables.
        heading: Its name in plots, with the unit.
        value: The quantity of one sample; ``None`` if the sample has none, because it failed.
        estimate: The quantity of a cell with its interval; ``None`` if no sample has one.
        is_share: Whether it lies between 0 and 1 and is shown in percent.
        parts: The numerator and denominator that one sample contributes, where the quantity of
            a cell is a ratio of sums; not given where it is the mean over the examples.
        of_ratio: Function of that ratio which gives the quantity, such as the exponential.
        is_binary: Whether it is 0 or 1 for each sample.
        more_is_better: Whether a larger quantity is a better one; by default a share's is.
    """

    name: str
    title: str
    heading: str
    value: Callable[[Sample], float | None]
    estimate: Callable[[Sequence[Sample]], Interval | None]
    is_share: bool = False
    parts: Callable[[Sample], tuple[float, float] | None] | None = None
    of_ratio: Callable[[float], float] = float
    is_binary: bool = False
    more_is_better: bool = attrs.field()

    @more_is_better.default
    def _shares_are(self) -> bool:
        return self.is_share

    @property
    def info(self) -> ColumnInfo:
        """What the manifest says of it."""
        return ColumnInfo(self.name, self.title, self.heading, self.is_share, self.more_is_better)

    def format(self, value: float) -> str:
        """Format one value."""
        return f"{value:.0%}" if self.is_share else f"{value:.4g}"


@attrs.frozen
class EvalRequest:
    """An example and the request that the engine is given for it."""

    example: Example
    request: "Request"


@attrs.frozen
class EvalOutcome:
    """The measurements of one example.

    Attributes:
        result: The engine's result.
        correct: The grader's verdict; ``None`` without a grader or without a verdict.
        values: Measured values by name.
        problem: Why the grader has no verdict.
        breakdowns: Values of its parts, by what the parts are, see `Metric.facets`.
    """

    result: Result
    correct: bool | None = None
    values: Mapping[str, float] = attrs.field(factory=dict)
    problem: str | None = None
    breakdowns: Mapping[str, Breakdown] = attrs.field(factory=dict)


class Evaluation(Protocol):
    """Examples being measured under one plan."""

    @property
    def run(self) -> "Run":
        """Yields results as they finish; result ``i`` is that of the ``i``-th request."""

    def outcome(self, result: Result) -> EvalOutcome:
        """Measure a finished result."""


class Metric(Protocol):
    """A way to measure cells; `PlainMetric` has what most of them say."""

    @property
    def name(self) -> str:
        """What is measured, in one word; part of the key of every stored sample."""

    @property
    def columns(self) -> Sequence[Column]:
        """Columns of tables; the first is plotted and compared between cells."""

    @property
    def facets(self) -> Sequence[str]:
        """What the values of a sample are broken down by, such as ``"layer"``."""

    @property
    def reads_reference(self) -> bool:
        """Whether outcomes depend on the examples' reference texts."""

    @property
    def runs_code(self) -> bool:
        """Whether code written by a model is executed, which the user has to allow."""

    @property
    def is_greedy(self) -> bool:
        """Whether no token is sampled, so that all attempts at an example would be equal."""

    def begin(
        self, engine: "Engine", requests: Sequence[EvalRequest], shared: Shared
    ) -> Evaluation:
        """Set up an evaluation; nothing is computed before its run is iterated over.

        Args:
            engine: The model under the plan of the cell.
            requests: What is asked.
            shared: Keeps what is the same for all plans, such as the run of the full cache.
        """


class PlainMetric:
    """What most metrics say of themselves; a metric that differs says so."""

    facets: Sequence[str] = ()
    reads_reference: bool = False
    runs_code: bool = False
    is_greedy: bool = False


@attrs.frozen
class Graded(PlainMetric):
    """The metric of tasks with a grader: the share of correct answers.

    Attributes:
        grade: Whether a text answers an example; raises `GradeError` if it has no verdict.
        runs_code: Whether it executes code that the model wrote.
    """

    name = "answers"

    grade: Callable[[str, Example], bool]
    runs_code: bool = False

    @property
    def columns(self) -> Sequence[Column]:
        """Accuracy: pass@1 where each question has several attempts."""
        return (ACCURACY,)

    def begin(
        self, engine: "Engine", requests: Sequence[EvalRequest], shared: Shared
    ) -> Evaluation:
        """Generate answers."""
        run = engine.generate([one.request for one in requests])
        return _GradedEvaluation(run, self.grade, [one.example for one in requests])


@attrs.frozen
class _GradedEvaluation:
    run: "Run"
    grade: Callable[[str, Example], bool]
    examples: Sequence[Example]

    def outcome(self, result: Result) -> EvalOutcome:
        if result.finish_reason == "error":
            return EvalOutcome(result, correct=False)
        try:
            correct = self.grade(result.text or "", self.examples[result.id])
        except GradeError as error:
            return EvalOutcome(result, problem=str(error))
        return EvalOutcome(result, correct)


def grader_of(task: Task) -> Callable[[str, Example], bool]:
    """The grader of a task.

    Args:
        task: The task.

    Raises:
        TaskError: The task has another metric, or its grader would execute code of the model.
    """
    if not isinstance(task.metric, Graded) or task.metric.runs_code:
        msg = f"task '{task.name}' has no grader that reads the text of an answer only"
        raise TaskError(msg)
    return task.metric.grade


def mean_of(
    name: str,
    title: str,
    heading: str,
    value: Callable[[Sample], float | None] | None = None,
    *,
    is_share: bool = False,
    least: float = -math.inf,
    more_is_better: bool | None = None,
) -> Column:
    """Make a column for the mean of a quantity over the examples.

    Args:
        name: Its name in files.
        title: Its short name in tables.
        heading: Its name in plots.
        value: The quantity of one sample; by default the value ``name`` of its outcome.
        is_share: Whether it lies between 0 and 1 and is shown in percent.
        least: The least that another quantity can be, such as 0 for seconds: its interval does not
            go below.
        more_is_better: Whether a larger one is better; by default a share is.
    """
    of_sample = value or (lambda sample: sample.values.get(name))

    ends = (0.0, 1.0) if is_share else (least, math.inf)

    def estimate(samples: Sequence[Sample]) -> Interval | None:
        means = mean_by_example(samples, of_sample)
        return mean(list(means.values()), least=ends[0], most=ends[1]) if means else None

    is_better = is_share if more_is_better is None else more_is_better
    return Column(name, title, heading, of_sample, estimate, is_share, more_is_better=is_better)


def share_of(
    name: str,
    title: str,
    heading: str,
    value: Callable[[Sample], float | None] | None = None,
    *,
    more_is_better: bool = True,
) -> Column:
    """Make a column for the share of samples of which something is true.

    Args:
        name: Its name in files.
        title: Its short name in tables.
        heading: Its name in plots.
        value: 1 or 0 for one sample; by default the value ``name`` of its outcome.
        more_is_better: Whether a larger share is better.
    """
    of_sample = value or (lambda sample: sample.values.get(name))

    def estimate(samples: Sequence[Sample]) -> Interval | None:
        attempts = by_example(samples, of_sample).values()
        return pass_at_1([list(map(bool, tries)) for tries in attempts]) if attempts else None

    return Column(
        name,
        title,
        heading,
        of_sample,
        estimate,
        is_share=True,
        is_binary=True,
        more_is_better=more_is_better,
    )


def ratio_of(
    name: str,
    title: str,
    heading: str,
    parts: Callable[[Sample], tuple[float, float] | None],
    of_ratio: Callable[[float], float] = float,
    *,
    least: float = -math.inf,
) -> Column:
    """Make a column for a ratio of sums over the examples, such as the loss of all tokens.

    Args:
        name: Its name in files.
        title: Its short name in tables.
        heading: Its name in plots.
        parts: Numerator and denominator of one sample; ``None`` if it has none.
        of_ratio: Rising function of the ratio that is shown.
        least: The least that the ratio can be, as for `mean_of`.
    """

    def value(sample: Sample) -> float | None:
        found = parts(sample)
        return None if found is None else of_ratio(found[0] / found[1])

    def estimate(samples: Sequence[Sample]) -> Interval | None:
        sums = sums_by_example(samples, parts).values()
        if not sums:
            return None
        found = ratio(*zip(*sums, strict=True), least=least)
        return Interval(of_ratio(found.value), of_ratio(found.low), of_ratio(found.high))

    return Column(name, title, heading, value, estimate, parts=parts, of_ratio=of_ratio)


def by_example(
    samples: Sequence[Sample], value: Callable[[Sample], _Value | None]
) -> dict[int, list[_Value]]:
    """Values of samples by example; samples of one example are its attempts.

    Args:
        samples: The samples.
        value: The value of one; ``None`` leaves it out.
    """
    groups: dict[int, list[_Value]] = {}
    for sample in samples:
        found = value(sample)
        if found is not None:
            groups.setdefault(sample.item, []).append(found)
    return groups


def mean_by_example(
    samples: Sequence[Sample], value: Callable[[Sample], float | None]
) -> dict[int, float]:
    """The value of each example that has one: the mean over its attempts."""
    return {item: fmean(values) for item, values in by_example(samples, value).items()}


def sums_by_example(
    samples: Sequence[Sample], parts: Callable[[Sample], tuple[float, float] | None]
) -> dict[int, tuple[float, float]]:
    """Numerator and denominator of each example that has them, summed over its attempts."""
    return {
        item: (math.fsum(part for part, _ in pairs), math.fsum(whole for _, whole in pairs))
        for item, pairs in by_example(samples, parts).items()
    }


def _is_correct(sample: Sample) -> float:
    return float(bool(sample.correct))


def _num_tokens(sample: Sample) -> float | None:
    return None if sample.finish_reason == "error" else float(sample.num_tokens)


LENGTH = mean_of("length", "tokens", "Generated tokens", _num_tokens, least=0)
ACCURACY = share_of("accuracy", "accuracy", "Accuracy", _is_correct)


@attrs.frozen
class TaskInfo:
    """One installed task.

    Attributes:
        name: What a user types.
        target: ``module:object``.
        distribution: Package that installed it, with version.
        summary: First line of its docstring.
        options: Its options with their defaults, as Python writes them.
        problem: Why it cannot be loaded, if it cannot.
    """

    name: str
    target: str
    distribution: str
    summary: str = ""
    options: Mapping[str, str] = attrs.field(factory=dict)
    problem: str | None = None


def installed_tasks() -> list[TaskInfo]:
    """All installed tasks, in alphabetical order."""
    return [_describe(point) for point in installed(GROUP).values()]


def load_task(text: str) -> Any:
    """Load a task by what a user types.

    Args:
        text: A task's name, a file or a hub id; then, optionally, a colon and options separated
            by commas, such as ``"questions:source=my.jsonl,chat=false"``.

    Returns:
        The `Task`.

    Raises:
        TaskError: There is no such task, it cannot be loaded, or it rejects an option.
    """
    name, options = _parse(text)
    if name not in (known := installed(GROUP)):
        if not (_is_file(name) or _is_hub_id(name)):
            msg = f"no task, file or hub id OWNER/NAME is named '{name}'{nearest(name, known)}"
            raise TaskError(msg)
        name, options = QUESTIONS, {"source": name, **options}
    return _build(name, load_installed(GROUP, name, what="task", error=TaskError), options)


def is_task_or_data_set(text: str) -> bool:
    """Whether what a user types names an installed task, or examples in a data set.

    Args:
        text: As for `load_task`.
    """
    name, _ = _parse(text)
    if name in installed(GROUP):
        return True
    suffix = Path(name).suffix
    # A path with a suffix is a file, also where there is none of that name.
    return suffix in _DATA_SETS or (not suffix and not Path(name).exists() and _is_hub_id(name))


def fitted(task: Task, tokenizer: Any) -> Task:
    """A task for the model with a tokenizer.

    Args:
        task: The task.
        tokenizer: The tokenizer, which counts the tokens of its examples.

    Returns:
        What the task's method ``for_tokenizer(tokenizer)`` returns; the task itself, if it has
        none because its examples are the same for all models.
    """
    if not needs_tokenizer(task):
        return task
    found: Task = task.for_tokenizer(tokenizer)  # type: ignore[attr-defined]
    return found


def needs_tokenizer(task: Task) -> bool:
    """Whether the examples of a task depend on the tokenizer of the model."""
    return hasattr(task, "for_tokenizer")


def require_tokenizer(task: Any) -> None:
    """Refuse to draw examples of a task that was not fitted to a model.

    Args:
        task: A task with the attribute ``tokenizer``, ``None`` where it is not known.

    Raises:
        TaskError: It is not known.
    """
    if task.tokenizer is None:
        msg = (
            f"task '{task.name}' counts the tokens of its prompts with the tokenizer of a model; "
            "name the model with --model"
        )
        raise TaskError(msg)


def spell(name: str, options: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    """A task's name with the options that differ from their defaults, as a user types it.

    Args:
        name: The task's name.
        options: Its options.
        defaults: Their defaults.
    """
    changed = {key: value for key, value in options.items() if value != defaults.get(key)}
    parts = [f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in changed.items()]
    return f"{name}:{','.join(parts)}" if parts else name


def spell_fields(name: str, task: attrs.AttrsInstance) -> str:
    """The same, of a task whose fields are its options, beside the tokenizer of a model.

    Args:
        name: The task's name.
        task: The task.
    """
    fields = [one for one in attrs.fields(type(task)) if one.name != "tokenizer"]
    options = {one.name: getattr(task, one.name) for one in fields}
    return spell(name, options, {one.name: one.default for one in fields})


def _parse(text: str) -> tuple[str, dict[str, str]]:
    """Split ``NAME:KEY=VALUE,...``; a colon without ``KEY=`` behind it belongs to the name."""
    found = re.search(r":(?=[A-Za-z_]\w*=)", text)
    if found is None:
        return text, {}
    options = {}
    for part in text[found.end() :].split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            msg = f"task '{text}': option '{part}' is not KEY=VALUE"
            raise TaskError(msg)
        options[key.strip()] = value.strip()
    return text[: found.start()], options


def _is_file(name: str) -> bool:
    return Path(name).suffix in (*_DATA_SETS, ".txt") or (
        Path(name).exists() and name not in ("", ".")
    )


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".")


def _build(name: str, make: Any, given: Mapping[str, str]) -> Any:
    with plugin_code(f"task '{name}' is broken", TaskError):
        known = inspect.signature(make).parameters
    options: dict[str, object] = {}
    for key, value in given.items():
        if key not in known:
            msg = f"task '{name}' has no option '{key}'{nearest(key, known)}"
            raise TaskError(msg)
        options[key] = _convert(f"task '{name}'", key, value, known[key].annotation)
    with plugin_code(
        f"task '{name}' rejects its options",
        TaskError,
        hint=". See `kvpolicy tasks list`",
        describe=refusal_reason,
        passes=(KVPolicyError,),
    ):
        return make(**options)


def _convert(owner: str, key: str, value: str, kind: Any) -> object:
    """Convert an option to the type of its annotation; of ``int | None``, to an int."""
    kind = next((one for one in get_args(kind) if one is not NoneType), kind)
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        if kind in (int, float):
            return kind(value)
    except (ValueError, KeyError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        msg = f"{owner} got {key}={value!r}; expected {expected}"
        raise TaskError(msg) from None
    return value


def _describe(point: EntryPoint) -> TaskInfo:
    info = TaskInfo(point.name, point.value, distribution(point))
    try:
        make = load_installed(GROUP, point.name, what="task", error=TaskError)
        with plugin_code(f"task '{point.name}' is broken", TaskError):
            options = {
                key: "required" if found.default is found.empty else repr(found.default)
                for key, found in inspect.signature(make).parameters.items()
            }
            summary = (inspect.getdoc(make) or "").partition("\n")[0]
    except TaskError as error:
        return attrs.evolve(info, problem=str(error))
    return attrs.evolve(info, summary=summary, options=options)
