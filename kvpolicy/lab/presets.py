"""Ready-made comparisons: TOML files that packages bring along, found by entry point.

An entry point of the group ``kvpolicy.presets`` gives a name to a package, whose folder holds
``NAME.toml`` with the fields of `Preset`.
"""

import tomllib
from pathlib import Path
from typing import Any

import attrs
import cattrs
from attrs.validators import deep_iterable, ge, min_len

from kvpolicy.bundled import bundled_file
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.tasks import Split
from kvpolicy.plan import Plan
from kvpolicy.planfile import first_problem, tables

GROUP = "kvpolicy.presets"
DEFAULT_PRESET = "baselines"


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
        object.__setattr__(self, "plan", tables(self.plan, name))
        Plan.from_dict(self.plan, name=name)


@attrs.frozen
class Preset:
    """A comparison, ready to run.

    Attributes:
        model: ``reasoner``, a hub id or a local folder.
        task: Name of the task, a file or a hub id, with its options.
        n: Items of the task for each cell.
        seed: Chooses the items.
        max_new_tokens: The most tokens a sample may generate.
        slots: Samples decoded together.
        budgets: Budgets at which every series is run.
        buffer: Rows that may join before the next compaction.
        series: What is compared, the reference first.
        split: Which items: ``"test"`` to report on, ``"tune"`` to choose settings on.
        attempts: How often each item is asked; their mean is pass@1.
        temperature: Of the drawing of tokens; 0 takes the likeliest.
        top_p: Tokens are drawn from the likeliest up to this probability.
        name: What the user typed.
    """

    model: str
    task: str
    n: int = attrs.field(validator=ge(1))
    seed: int
    max_new_tokens: int = attrs.field(validator=ge(1))
    slots: int = attrs.field(validator=ge(1))
    budgets: tuple[int, ...] = attrs.field(
        validator=[min_len(1), deep_iterable(ge(1))],
    )
    buffer: int = attrs.field(validator=ge(1))
    series: tuple[Series, ...] = attrs.field(validator=min_len(1))
    split: Split = "test"
    attempts: int = attrs.field(default=1, validator=ge(1))
    temperature: float = attrs.field(default=0.0, validator=ge(0))
    top_p: float = 1.0
    name: str = ""


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
        return _structure(_read(path), path.stem)
    path = bundled_file(GROUP, name_or_path, suffix=".toml", what="preset")
    return _structure(_read(path), name_or_path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"preset {path} cannot be read: {error.strerror}."
        raise KVPolicyError(msg) from error
    except ValueError as error:
        msg = f"preset {path} is not valid TOML: {error}."
        raise KVPolicyError(msg) from error


def _structure(data: dict[str, Any], name: str) -> Preset:
    converter = cattrs.Converter(forbid_extra_keys=True)
    try:
        return attrs.evolve(converter.structure(data, Preset), name=name)
    except cattrs.BaseValidationError as error:
        msg = f"preset '{name}': {first_problem(error)}."
        raise KVPolicyError(msg) from error


def full_cache_plan() -> Plan:
    """The plan in which no row ever leaves: the reference that the default preset begins with."""
    reference = load_preset(DEFAULT_PRESET).series[0]
    return Plan.from_dict(reference.plan, name=f"plan '{reference.label}'")
