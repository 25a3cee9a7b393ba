"""Comparisons in TOML files: a user's own, or brought along by packages and found by entry point.

An entry point of the group ``kvpolicy.presets`` gives a name to a package, whose folder holds
``NAME.toml``. The file says what `Preset` says; docs/reference/sweeps.md lists its keys.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs
from attrs.validators import deep_iterable, ge, min_len

from kvpolicy.entry_points import default_name, installed_file
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.tasks.task import Split
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.spec import problems_of
from kvpolicy.plan.toml import read_file, read_tables

GROUP = "kvpolicy.presets"

Combine = Literal["product", "zip"]

_PLURALS = {"model": "models", "task": "tasks", "seed": "seeds", "budget": "budgets"}


@attrs.frozen
class Series:
    """One line of a comparison: a plan, run at every budget.

    Attributes:
        label: What tables and plots call it.
        plan: What a plan file would say, without the budget; what it extends is read in.

    Raises:
        PlanError: What it says makes no plan.
    """

    label: str
    plan: dict[str, Any]

    def __attrs_post_init__(self) -> None:
        name = f"plan '{self.label}'"
        object.__setattr__(self, "plan", read_tables(self.plan, name))
        Plan.from_dict(self.plan, name=name)


def series_of_stack(stack: str) -> Series:
    """Make a series of what the user typed.

    Args:
        stack: Names of policies joined by ``+``, the later ones wrapping the earlier ones.

    Returns:
        A series labelled as typed.
    """
    return Series(label=stack, plan={"stack": [name.strip() for name in stack.split("+")]})


def series_of_file(path: Path) -> Series:
    """Make a series of a plan file, labelled by the name of the file.

    Args:
        path: A TOML plan, or the name of an installed one.

    Returns:
        The series.

    Raises:
        PlanError: The file cannot be read or is no TOML.
    """
    return Series(label=path.stem, plan=read_file(path))


def _knob_lists(instance: object, attribute: object, knobs: Mapping[str, tuple[Any, ...]]) -> None:
    for knob, values in knobs.items():
        if not values:
            msg = f"'{knob}' has no value to be tried; write for example [0.1, 0.2]"
            raise ValueError(msg)


@attrs.frozen
class Preset:
    """A sweep, ready to be prepared: every series on every model, task and seed.

    Attributes:
        models: Names of installed models, hub ids or local folders.
        tasks: Names of tasks, files or hub ids, with their options.
        n: Items of the task for each cell.
        max_new_tokens: The most tokens a sample may generate.
        slots: Samples decoded together.
        budgets: Budgets at which every series is run.
        buffer: Rows that may join before the next compaction.
        series: What is compared, the reference first.
        seeds: Each chooses items, and how tokens are drawn.
        knobs: Values to be tried, by what ``--set`` would call them: ``POLICY.KNOB``, ``buffer``.
        combine: ``"product"``: every model with every task, seed, budget and value of each
            knob; ``"zip"``: the first with the first, the second with the second, and so on,
            where a list of one entry stands for as many as the others have.
        split: Which items: ``"test"`` to report on, ``"tune"`` to choose settings on.
        attempts: How often each item is asked; their mean is pass@1.
        temperature: Of the drawing of tokens; 0 takes the likeliest.
        top_p: Tokens are drawn from the likeliest up to this probability.
        name: What the user typed.
    """

    models: tuple[str, ...] = attrs.field(validator=min_len(1))
    tasks: tuple[str, ...] = attrs.field(validator=min_len(1))
    n: int = attrs.field(validator=ge(1))
    max_new_tokens: int = attrs.field(validator=ge(1))
    slots: int = attrs.field(validator=ge(1))
    budgets: tuple[int, ...] = attrs.field(validator=[min_len(1), deep_iterable(ge(1))])
    buffer: int = attrs.field(validator=ge(1))
    series: tuple[Series, ...] = attrs.field(validator=min_len(1))
    seeds: tuple[int, ...] = attrs.field(default=(0,), validator=[min_len(1), deep_iterable(ge(0))])
    knobs: dict[str, tuple[Any, ...]] = attrs.field(factory=dict, validator=_knob_lists)
    combine: Combine = "product"
    split: Split = "test"
    attempts: int = attrs.field(default=1, validator=ge(1))
    temperature: float = attrs.field(default=0.0, validator=ge(0))
    top_p: float = 1.0
    name: str = ""


def default_preset() -> str:
    """Name of the preset that an installed package makes the default.

    Raises:
        KVPolicyError: No installed package does.
    """
    name = default_name("sweep")
    if name is None:
        msg = "no sweep was named, and no installed package sets a default: give --preset FILE."
        raise KVPolicyError(msg)
    return name


def load_preset(name_or_path: str) -> Preset:
    """Read a preset.

    Args:
        name_or_path: Name of an installed preset, or path of a TOML file.

    Returns:
        The preset.

    Raises:
        KVPolicyError: There is no such preset, or it cannot be read or makes no sense.
    """
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return _structure(_read(path), path.parent, path.stem)
    path = installed_file(GROUP, name_or_path, suffix=".toml", what="preset")
    return _structure(_read(path), path.parent, name_or_path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"preset {path} cannot be read: {error.strerror}."
        raise KVPolicyError(msg) from error
    except ValueError as error:
        msg = f"preset {path} is not valid TOML: {error}."
        raise KVPolicyError(msg) from error


def _structure(data: dict[str, Any], folder: Path, name: str) -> Preset:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(int, lambda value, _: _whole(value))
    try:
        listed = _with_series(_with_lists(data), folder)
        return attrs.evolve(converter.structure(listed, Preset), name=name)
    except cattrs.BaseValidationError as error:
        msg = f"preset '{name}': {problems_of(error)[0]}."
        raise KVPolicyError(msg) from error
    except ValueError as error:
        msg = f"preset '{name}': {error}."
        raise KVPolicyError(msg) from error


def _with_lists(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says, with a list wherever one may stand: ``seed = 0`` is ``seeds = [0]``."""
    listed = dict(data)
    for singular, plural in _PLURALS.items():
        if singular in data and plural in data:
            msg = f"it has both '{singular}' and '{plural}'; take one out"
            raise ValueError(msg)
        if singular in data:
            listed[plural] = listed.pop(singular)
        if plural in listed:
            listed[plural] = _as_list(listed[plural])
    knobs = listed.get("knobs")
    if isinstance(knobs, dict):
        listed["knobs"] = dict(_knobs(knobs))
    return listed


def _knobs(table: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Lists of values by ``POLICY.KNOB``, which TOML takes for a table unless it is quoted."""
    for key, values in table.items():
        if isinstance(values, dict):
            yield from ((f"{key}.{knob}", _as_list(inner)) for knob, inner in values.items())
        else:
            yield key, _as_list(values)


def _with_series(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a file says, with what it lists by name among its series."""
    named = [series_of_stack(stack) for stack in _texts(data, "policies")]
    for plan in _texts(data, "plans"):
        is_here = (folder / plan).is_file()
        named.append(series_of_file(folder / plan if is_here else Path(plan)))
    rest = {key: value for key, value in data.items() if key not in ("policies", "plans")}
    if named:
        series = rest.get("series", [])
        rest["series"] = [*series, *(attrs.asdict(one) for one in named)]
    return rest


def _texts(data: Mapping[str, Any], key: str) -> list[str]:
    texts = _as_list(data.get(key, []))
    if not all(isinstance(text, str) for text in texts):
        msg = f"'{key}' is {data[key]!r:.60}; a list of names is wanted"
        raise ValueError(msg)
    return texts


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{value!r:.60} is not a whole number"
        raise TypeError(msg)
    return value


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
