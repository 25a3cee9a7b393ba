"""The points of a sweep: every setting of model, task, seed, budget and knobs that is run."""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import attrs

from kvpolicy.errors import PlanError
from kvpolicy.lab.sweep.sweep_file import Preset


@attrs.frozen
class Setting:
    """What a sweep says of a plan.

    Attributes:
        budget: The budget, for plans that leave it open.
        knobs: Values of knobs, by ``POLICY.KNOB``, and of other entries, by name.
    """

    budget: int
    knobs: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Point:
    """One setting of everything.

    Attributes:
        model: The model, as typed.
        task: The task, as typed.
        seed: Chooses the items.
        setting: What is said of the plans.
    """

    model: str
    task: str
    seed: int
    setting: Setting


def points(preset: Preset) -> list[Point]:
    """All points of a sweep, in order: models outermost, then tasks, seeds, knobs, budgets.

    Args:
        preset: The sweep.

    Raises:
        PlanError: It goes through its lists side by side, and they differ in length.
    """
    axes: list[Sequence[Any]] = [preset.models, preset.tasks, preset.seeds]
    axes += [*preset.knobs.values(), preset.budgets]
    rows = product(*axes) if preset.combine == "product" else _side_by_side(preset, axes)
    return [
        Point(model, task, seed, Setting(budget, dict(zip(preset.knobs, values, strict=True))))
        for model, task, seed, *values, budget in rows
    ]


def _side_by_side(preset: Preset, axes: Sequence[Sequence[Any]]) -> "zip[tuple[Any, ...]]":
    names = ["models", "tasks", "seeds", *preset.knobs, "budgets"]
    lengths = {name: len(axis) for name, axis in zip(names, axes, strict=True) if len(axis) > 1}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{length} of {name}" for name, length in lengths.items())
        msg = (
            f"preset '{preset.name}' goes through its lists side by side, and there are {said}; "
            'make them equally long, or combine = "product"'
        )
        raise PlanError(msg)
    longest = max(lengths.values(), default=1)
    return zip(*(axis if len(axis) > 1 else [*axis] * longest for axis in axes), strict=True)


def in_words(knobs: Mapping[str, Any]) -> list[str]:
    """Values of knobs in words, without the policy's name where that is clear without it.

    Args:
        knobs: Values by ``POLICY.KNOB``, or by the name of another entry.
    """
    names = [key.rpartition(".")[2] for key in knobs]
    return [
        f"{name if names.count(name) == 1 else key}={_text(value)}"
        for name, (key, value) in zip(names, knobs.items(), strict=True)
    ]


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)
