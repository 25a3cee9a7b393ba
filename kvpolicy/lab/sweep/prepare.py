"""From what a user asks for to a comparison that can be run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.engine.request import Sampling
from kvpolicy.entry_points import nearest
from kvpolicy.errors import TaskError
from kvpolicy.lab.models import ModelProvider
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.grid import Cell, cells_at
from kvpolicy.lab.sweep.group import Group, digest
from kvpolicy.lab.sweep.sweep import Setting, points
from kvpolicy.lab.sweep.sweep_file import (
    Preset,
    Series,
    default_preset,
    load_preset,
    series_of_file,
    series_of_stack,
)
from kvpolicy.lab.tasks.chat_template import wrap
from kvpolicy.lab.tasks.task import Item, Task, load_task

# A model, a task and a seed, as typed.
Whom = tuple[str, str, int]


def choose(
    preset: str | None,
    *,
    policies: Sequence[str] = (),
    plans: Sequence[Path] = (),
    budgets: Sequence[int] = (),
    buffer: int | None = None,
) -> Preset:
    """Put a comparison together.

    Args:
        preset: Name or file of a preset; the default one if not given.
        policies: Stacks to compare instead of the preset's series. One that a series of the
            preset consists of is that series, with its label and knobs.
        plans: Plan files to compare; instead of the preset's series if no preset is named.
        budgets: Budgets, also for the plans that have one of their own.
        buffer: Buffer, likewise.

    Returns:
        The preset with other series, budgets and buffer.

    Raises:
        KVPolicyError: The preset or a plan cannot be read.
    """
    base = load_preset(preset or default_preset())
    if policies:
        known = {_stack(series): series for series in base.series}
        series = [known.get(stack) or series_of_stack(stack) for stack in policies]
    else:
        series = [] if plans and preset is None else list(base.series)
    series += [series_of_file(path) for path in plans]
    given = {"budget": bool(budgets), "buffer": buffer is not None}
    series = [_without(one, [key for key, is_given in given.items() if is_given]) for one in series]
    name = base.name if not policies and not plans else "-".join(one.label for one in series)
    return attrs.evolve(
        base,
        series=tuple(series),
        budgets=tuple(budgets) or base.budgets,
        buffer=buffer or base.buffer,
        name=name,
    )


def prepare(
    preset: Preset,
    models: ModelProvider,
    *,
    overrides: Sequence[str] = (),
    execute_code: bool = False,
) -> Comparison:
    """Draw the items, look at every model, resolve the plans.

    Args:
        preset: What to compare.
        models: Describes them and gives their tokenizers.
        overrides: ``--set`` strings.
        execute_code: Whether programs may be run that a model writes.

    Returns:
        The comparison. A group or cell that comes up twice under different names, such as one
        model by name and by folder, is in it once.

    Raises:
        KVPolicyError: Something does not exist, or does not fit.
    """
    settings: dict[Whom, list[Setting]] = {}
    for point in points(preset):
        settings.setdefault((point.model, point.task, point.seed), []).append(point.setting)
    groups = _groups(preset, list(settings), models, execute_code=execute_code)
    distinct: dict[str, Group] = {}
    cells: dict[str, Cell] = {}
    for whom, group in groups.items():
        group = distinct.setdefault(group.id, group)
        found = cells_at(
            preset.series,
            settings[whom],
            num_layers=group.model.num_layers,
            buffer=preset.buffer,
            overrides=overrides,
            group=group.id,
        )
        cells.update((cell.id, cell) for cell in found if cell.id not in cells)
    return Comparison(preset.name, list(distinct.values()), list(cells.values()))


def check_facet(comparison: Comparison, facet: str | None) -> None:
    """Refuse a facet that no item has, before anything is computed.

    Args:
        comparison: What is to be run.
        facet: What the table is to be broken down by, if by anything.

    Raises:
        TaskError: No item has it.
    """
    known = {name for group in comparison.groups for item in group.items for name in item.facets}
    if facet is not None and facet not in known:
        msg = f"no item that is asked has a '{facet}'"
        raise TaskError(msg + nearest(facet, sorted(known)))


def default_folder(comparison: Comparison) -> Path:
    """A results folder whose name is the same for the same run, and for no other.

    Args:
        comparison: Gives the name and the digest.
    """
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in comparison.name)[:60]
    return Path("kvpolicy-ablate") / f"{name}-{digest(comparison.to_dict())[:8]}"


def _groups(
    preset: Preset, asked_of: Sequence[Whom], models: ModelProvider, *, execute_code: bool
) -> dict[Whom, Group]:
    tasks = {name: _task(name, execute_code=execute_code) for name in preset.tasks}
    asked = {pair: _items(preset, tasks[pair[0]], *pair) for pair in {one[1:] for one in asked_of}}
    groups = {}
    # The first model comes last: it is run first, and need not be loaded again then.
    for name in reversed(dict.fromkeys(preset.models)):
        card, tokenizer = models.describe(name)
        for task, seed in [one[1:] for one in asked_of if one[0] == name]:
            groups[name, task, seed] = Group(
                model=card,
                task=tasks[task],
                items=wrap(asked[task, seed], tokenizer),
                split=preset.split,
                sampling=Sampling(preset.temperature, top_p=preset.top_p, seed=seed),
                seed=seed,
                max_new_tokens=preset.max_new_tokens,
                slots=preset.slots,
            )
    return {whom: groups[whom] for whom in asked_of}


def _task(name: str, *, execute_code: bool) -> Any:
    task = load_task(name)
    if task.measure.runs_code and not execute_code:
        msg = (
            f"task '{name}' is graded by running the programs that the model writes; "
            "give --execute-code to allow that (docs/how-to/run-a-benchmark.md says how far "
            "they are confined)"
        )
        raise TaskError(msg)
    return task


def _items(preset: Preset, task: Task, name: str, seed: int) -> list[Item]:
    """Each item of a task and a seed, as often as it is to be asked."""
    items = task.items(preset.n, seed=seed, split=preset.split)
    if not items:
        msg = f"task '{name}' has no items in its {preset.split} split"
        raise TaskError(msg)
    if preset.attempts > 1 and preset.temperature == 0:
        msg = (
            f"{preset.attempts} attempts at each item would be all alike at temperature 0; "
            "give for example --temperature 0.6 --top-p 0.95"
        )
        raise TaskError(msg)
    numbers = range(preset.attempts)
    return [attrs.evolve(item, attempt=number) for item in items for number in numbers]


def _stack(series: Series) -> str:
    entries = series.plan.get("stack", []) if "layers" not in series.plan else []
    return "+".join(e if isinstance(e, str) else str(e.get("policy")) for e in entries)


def _without(series: Series, keys: Sequence[str]) -> Series:
    return attrs.evolve(series, plan={k: v for k, v in series.plan.items() if k not in keys})
