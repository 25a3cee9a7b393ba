"""What an ablation asks a model: tasks by name, by file and by hub id.

A task gives items, and says how a cell is measured with them (`kvpolicy.lab.tasks.measures`).
Packages bring tasks along by an entry point of the group ``kvpolicy.tasks``: it names something
to call with the task's options, which returns a `Task`. Only the one that is asked for is
imported.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.hooks.discovery import nearest

if TYPE_CHECKING:
    from kvpolicy.lab.tasks.measures import Measure

GROUP = "kvpolicy.tasks"

# What answers to a file or a hub id: the entry point of this name, with it for its source.
QUESTIONS = "questions"

Split = Literal["train", "tune", "test"]


@attrs.frozen
class Item:
    """One question of a task.

    Attributes:
        index: Number of the item in its task and seed, from 0.
        prompt: What the model is given.
        answer: What a right text contains, in the words of the task's grader.
        facets: What a report may group by, such as the difficulty.
        reference: A text that answers the prompt, for tasks that measure how likely a model
            finds it; ``None`` if nobody wrote one.
        chat: Whether the prompt is what a user says, to be wrapped in the chat template of
            the model before it is tokenized.
        attempt: Which attempt at the item this is, from 0.
    """

    index: int
    prompt: str
    answer: str
    facets: Mapping[str, int | str] = attrs.field(factory=dict)
    reference: str | None = None
    chat: bool = False
    attempt: int = 0


class Task(Protocol):
    """A set of questions, and how a cell is measured with them."""

    @property
    def name(self) -> str:
        """What the user types, with the options that differ from their defaults."""

    @property
    def measure(self) -> "Measure":
        """How a cell is measured, `measures.Graded` for questions with a grader."""

    def items(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Item]:
        """Draw ``n`` items of a split, or all if there are fewer.

        The same arguments give the same items, and the first ``k`` of them are the answer to
        ``n=k``. The split is ``"test"`` to report on, ``"tune"`` to choose settings on,
        ``"train"`` to learn from; a task that has no such split says so with a `TaskError`.
        """


@attrs.frozen
class TaskInfo:
    """One installed task.

    Attributes:
        name: What a user types.
        target: ``module:object``.
        distribution: Package that brings it, with version.
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


def load_task(text: str) -> Any:
    """Find a task by what a user types.

    Args:
        text: A task's name, a file or a hub id; then, if wanted, a colon and its options, such
            as ``"needle:length=400"``, separated by commas.

    Returns:
        The `Task`.

    Raises:
        TaskError: There is no such task, it cannot be loaded, or refuses an option.
    """
    name, options = _parse(text)
    points = _points()
    if name not in points:
        if not (_is_file(name) or _is_hub_id(name)):
            hint = nearest(name, sorted(points))
            msg = f"no task is named '{name}'{hint}; a file or a hub id OWNER/NAME will do, too"
            raise TaskError(msg)
        name, options = QUESTIONS, {"source": name, **options}
    return _build(name, _load(points[name]), options)


def installed_tasks() -> list[TaskInfo]:
    """All tasks that packages bring along, in alphabetical order."""
    return [_info(point) for _, point in sorted(_points().items())]


def spell(name: str, options: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    """A task's name with the options that differ from their defaults, as a user types it.

    Args:
        name: The task's name.
        options: Its options.
        defaults: What they are if nobody says otherwise.
    """
    changed = {key: value for key, value in options.items() if value != defaults.get(key)}
    said = [f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in changed.items()]
    return f"{name}:{','.join(said)}" if said else name


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _parse(text: str) -> tuple[str, dict[str, str]]:
    """Take ``NAME:KEY=VALUE,...`` apart; a colon that no ``KEY=`` follows belongs to the name."""
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
    return Path(name).suffix in (".jsonl", ".json", ".txt", ".csv", ".parquet") or (
        Path(name).exists() and name not in ("", ".")
    )


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".")


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        msg = (
            f"task '{point.name}' ({point.value}, {_distribution(point)}) cannot be imported: "
            f"{type(error).__name__}: {error}"
        )
        raise TaskError(msg) from error


def _build(name: str, make: Any, given: Mapping[str, str]) -> Any:
    known = inspect.signature(make).parameters
    options: dict[str, object] = {}
    for key, value in given.items():
        if key not in known:
            msg = f"task '{name}' has no option '{key}'{nearest(key, known)}"
            raise TaskError(msg)
        options[key] = _convert(f"task '{name}'", key, value, known[key].annotation)
    try:
        return make(**options)
    except (TypeError, ValueError) as error:
        msg = f"task '{name}' refuses its options: {error}. See `kvpolicy tasks list`"
        raise TaskError(msg) from error


def _convert(who: str, key: str, value: str, kind: Any) -> object:
    """Read an option the way its annotation says; texts are taken as they are."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        if kind in (int, float):
            return kind(value)
    except (ValueError, KeyError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        msg = f"{who} was given {key}={value!r}; {wanted} is wanted"
        raise TaskError(msg) from None
    return value


def _info(point: EntryPoint) -> TaskInfo:
    info = TaskInfo(point.name, point.value, _distribution(point))
    try:
        make = _load(point)
        options = {
            key: "required" if found.default is found.empty else repr(found.default)
            for key, found in inspect.signature(make).parameters.items()
        }
    except (TaskError, TypeError, ValueError) as error:
        return attrs.evolve(info, problem=str(error))
    summary = (inspect.getdoc(make) or "").partition("\n")[0]
    return attrs.evolve(info, summary=summary, options=options)


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "unknown package"
