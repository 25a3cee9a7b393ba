"""Sweep files: what to compare, on which models, tasks, seeds and budgets.

A sweep is a TOML file: a user's own, or one that an installed package provides under a name. An
entry point of the group ``kvpolicy.presets`` maps the name to the package whose folder holds
``NAME.toml``. `SweepConfig` has the keys; docs/reference/sweeps.md lists them for users.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs
import cattrs
from attrs.validators import deep_iterable, ge, min_len, optional

from kvpolicy.entry_points import installed_file
from kvpolicy.errors import KVPolicyError, PlanError
from kvpolicy.files import read_toml
from kvpolicy.lab.tasks.task import Split
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.spec import problems_of
from kvpolicy.plan.toml import read_file, read_tables
from kvpolicy.quantities import parse_bytes

GROUP = "kvpolicy.presets"

Combine = Literal["product", "zip"]

_PLURALS = {"model": "models", "task": "tasks", "seed": "seeds", "budget": "budgets"}


@attrs.frozen
class Series:
    """One plan to compare, run at every budget.

    Attributes:
        label: Its name in tables and plots.
        plan: The content of a plan file, usually without a budget. A plan that it extends is
            already merged in.

    Raises:
        PlanError: The content is not a valid plan.
    """

    label: str
    plan: dict[str, Any]

    def __attrs_post_init__(self) -> None:
        name = f"plan '{self.label}'"
        object.__setattr__(self, "plan", read_tables(self.plan, name))
        Plan.from_dict(self.plan, name=name)

    @classmethod
    def from_stack(cls, stack: str) -> "Series":
        """Make a series of policy names.

        Args:
            stack: Names of policies joined by ``+``; a later policy wraps the earlier ones. It
                is also the label.
        """
        return cls(label=stack, plan={"stack": [name.strip() for name in stack.split("+")]})

    @classmethod
    def from_file(cls, path: Path) -> "Series":
        """Make a series of a plan file, labelled by the file's name.

        Args:
            path: A TOML plan, or the name of an installed one.

        Raises:
            PlanError: The file cannot be read or is not a valid plan.
        """
        return cls(label=path.stem, plan=read_file(path))


def _check_knobs(instance: object, attribute: object, knobs: Mapping[str, Sequence[Any]]) -> None:
    for knob, values in knobs.items():
        if not values:
            msg = f"'{knob}' has an empty list of values; write for example [0.1, 0.2]"
            raise ValueError(msg)


def _check_one_size(instance: "SweepConfig", attribute: object, value: object) -> None:
    if value and instance.budgets:
        msg = "it has both 'budgets' and 'bytes', which choose the budgets; remove one of them"
        raise ValueError(msg)


@attrs.frozen
class SweepConfig:
    """The content of a sweep file, with the command line's changes.

    Attributes:
        models: Names of installed models, hub ids or local folders.
        tasks: Names of tasks, files or hub ids, with their options.
        n: Examples of the task in each setting.
        max_new_tokens: Generation limit of a sample.
        slots: Samples decoded together.
        budgets: Budgets at which to run every series; needed by plans without one of their own.
        bytes: Instead of budgets: bytes that the cache allocates for each sequence. Every series
            runs with the largest budget that fits.
        buffer: Rows that may join before the next compaction; likewise.
        prefill_buffer: Rows that may while a prompt enters; likewise.
        series: The plans to compare; the first one is the baseline.
        seeds: Each selects examples and seeds the sampling of tokens.
        knobs: Values to try, by the path that ``--set`` takes: ``POLICY.KNOB``, ``buffer``,
            ``prefill_buffer`` or ``rows``, for which a file also has a key of its own.
        combine: ``"product"``: all combinations of models, tasks, seeds, budgets and knob
            values. ``"zip"``: the first of each list, then the second of each, and so on; a list
            with one entry is repeated.
        split: ``"test"`` to report on, ``"tune"`` to choose settings on, ``"train"``.
        attempts: Samples per example; their mean is pass@1.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Sample from the likeliest tokens up to this total probability.
        name: Name of the sweep, as typed.
    """

    models: tuple[str, ...] = attrs.field(validator=min_len(1))
    tasks: tuple[str, ...] = attrs.field(validator=min_len(1))
    series: tuple[Series, ...] = attrs.field(validator=min_len(1))
    n: int = attrs.field(default=100, validator=ge(1))
    max_new_tokens: int = attrs.field(default=1024, validator=ge(1))
    slots: int = attrs.field(default=8, validator=ge(1))
    budgets: tuple[int, ...] = attrs.field(default=(), validator=deep_iterable(ge(1)))
    bytes: tuple[int, ...] = attrs.field(
        default=(), validator=[deep_iterable(ge(1)), _check_one_size]
    )
    buffer: int | None = attrs.field(default=None, validator=optional(ge(1)))
    prefill_buffer: int | None = attrs.field(default=None, validator=optional(ge(1)))
    seeds: tuple[int, ...] = attrs.field(default=(0,), validator=[min_len(1), deep_iterable(ge(0))])
    knobs: dict[str, tuple[Any, ...]] = attrs.field(factory=dict, validator=_check_knobs)
    combine: Combine = "product"
    split: Split = "test"
    attempts: int = attrs.field(default=1, validator=ge(1))
    temperature: float = attrs.field(default=0.0, validator=ge(0))
    top_p: float = 1.0
    name: str = ""

    def points(self) -> "list[Point]":
        """List all points, in order: models outermost, then tasks, seeds, knobs, budgets.

        Raises:
            PlanError: ``combine`` is ``"zip"`` and the lists differ in length.
        """
        axes: list[Sequence[Any]] = [self.models, self.tasks, self.seeds]
        axes += [*self.knobs.values(), self.bytes or self.budgets or (None,)]
        rows = product(*axes) if self.combine == "product" else self._zip(axes)

        def variant(values: Sequence[Any], size: int | None) -> Variant:
            knobs = dict(zip(self.knobs, values, strict=True))
            return Variant(None, knobs, size) if self.bytes else Variant(size, knobs)

        return [
            Point(model, task, seed, variant(values, size))
            for model, task, seed, *values, size in rows
        ]

    def _zip(self, axes: Sequence[Sequence[Any]]) -> "zip[tuple[Any, ...]]":
        names = ["models", "tasks", "seeds", *self.knobs, "bytes" if self.bytes else "budgets"]
        lengths = {name: len(axis) for name, axis in zip(names, axes, strict=True) if len(axis) > 1}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{length} of {name}" for name, length in lengths.items())
            msg = (
                f"preset '{self.name}' zips its lists, but they differ in length ({counts}); "
                'make them equally long, or use combine = "product"'
            )
            raise PlanError(msg)
        longest = max(lengths.values(), default=1)
        return zip(*(axis if len(axis) > 1 else [*axis] * longest for axis in axes), strict=True)


@attrs.frozen
class Variant:
    """What a sweep changes in the plans.

    Attributes:
        budget: The budget of plans that have none of their own, if any needs one.
        knobs: Values by ``POLICY.KNOB``, or by the name of a top-level entry such as ``buffer``.
        bytes: Instead of a budget: bytes for each sequence, within which it is the largest.
    """

    budget: int | None
    knobs: Mapping[str, Any] = attrs.field(factory=dict)
    bytes: int | None = None


@attrs.frozen
class Point:
    """One value of everything that a sweep varies, except the series.

    Attributes:
        model: The model, as typed.
        task: The task, as typed.
        seed: Selects the examples.
        variant: What changes in the plans.
    """

    model: str
    task: str
    seed: int
    variant: Variant


def load_preset(name_or_path: str) -> SweepConfig:
    """Read a sweep file.

    Args:
        name_or_path: Name of an installed sweep, or path of a TOML file.

    Raises:
        KVPolicyError: No such sweep exists, or the file cannot be read or is invalid.
    """
    path = Path(name_or_path)
    name = path.stem
    if path.suffix != ".toml":
        path = installed_file(GROUP, name_or_path, suffix=".toml", what="preset")
        name = name_or_path
    return _structure(read_toml(path, f"preset {path}"), path.parent, name)


def _structure(data: dict[str, Any], folder: Path, name: str) -> SweepConfig:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(int, lambda value, _: _integer(value))
    converter.register_structure_hook_func(_is_literal, _choice)
    try:
        normalized = _with_series(_with_lists(data), folder)
        return attrs.evolve(converter.structure(normalized, SweepConfig), name=name)
    except cattrs.BaseValidationError as error:
        msg = f"preset '{name}': {problems_of(error)[0]}."
        raise KVPolicyError(msg) from error
    except ValueError as error:
        msg = f"preset '{name}': {error}."
        raise KVPolicyError(msg) from error


def _with_lists(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's content with lists in place of single values: ``seed = 0``, ``seeds = 0``.

    Knobs become lists by ``POLICY.KNOB``, which TOML reads as a table unless it is quoted.
    """
    listed = dict(data)
    for singular, plural in _PLURALS.items():
        if singular in data and plural in data:
            msg = f"it has both '{singular}' and '{plural}'; remove one of them"
            raise ValueError(msg)
        if singular in data:
            listed[plural] = listed.pop(singular)
        if plural in listed:
            listed[plural] = _as_list(listed[plural])
    if "bytes" in listed:
        listed["bytes"] = [
            parse_bytes("'bytes'", one) if isinstance(one, str) else one
            for one in _as_list(listed["bytes"])
        ]
    knobs = listed.get("knobs")
    if isinstance(knobs, dict):
        listed["knobs"] = dict(_flat_knobs(knobs))
    if "rows" in listed:
        if "rows" in listed.get("knobs", {}):
            msg = "it has both 'rows' and a knob 'rows'; remove one of them"
            raise ValueError(msg)
        listed["knobs"] = {"rows": _as_list(listed.pop("rows")), **listed.get("knobs", {})}
    return listed


def _flat_knobs(table: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for key, values in table.items():
        if isinstance(values, dict) and key != "rows":
            yield from ((f"{key}.{knob}", _as_list(inner)) for knob, inner in values.items())
        else:
            yield key, _as_list(values)


def _with_series(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Append the file's ``policies`` and ``plans`` to its ``series``."""
    named = [Series.from_stack(stack) for stack in _names(data, "policies")]
    for plan in _names(data, "plans"):
        in_folder = folder / plan
        named.append(Series.from_file(in_folder if in_folder.is_file() else Path(plan)))
    rest = {key: value for key, value in data.items() if key not in ("policies", "plans")}
    if named:
        rest["series"] = [*rest.get("series", []), *(attrs.asdict(one) for one in named)]
    return rest


def _names(data: Mapping[str, Any], key: str) -> list[str]:
    names = _as_list(data.get(key, []))
    if not all(isinstance(name, str) for name in names):
        msg = f"'{key}' is {data[key]!r:.60}; expected a list of names"
        raise ValueError(msg)
    return names


def _integer(value: object) -> int:
    """Accept integers only; cattrs would convert ``1.5`` and ``true``."""
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{value!r:.60} is not a whole number"
        raise TypeError(msg)
    return value


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _choice(value: object, kind: Any) -> Any:
    """Accept one of the values of a `Literal`."""
    choices = get_args(kind)
    if value not in choices:
        msg = f"{value!r:.60} is none of the choices {', '.join(map(repr, choices))}"
        raise ValueError(msg)
    return value


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
