"""From what a user asks for to a comparison that can be run."""

from collections.abc import Sequence
from pathlib import Path

import attrs

from kvpolicy.discovery import nearest
from kvpolicy.errors import TaskError
from kvpolicy.lab.card import describe_model
from kvpolicy.lab.chat import wrap
from kvpolicy.lab.comparison import Comparison
from kvpolicy.lab.grid import build_cells, series_of_file, series_of_stack
from kvpolicy.lab.group import Group, digest
from kvpolicy.lab.presets import DEFAULT_PRESET, Preset, Series, load_preset
from kvpolicy.lab.shelf import Shelf
from kvpolicy.lab.tasks import Item, load_task
from kvpolicy.request import Sampling


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
    base = load_preset(preset or DEFAULT_PRESET)
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
    shelf: Shelf,
    *,
    overrides: Sequence[str] = (),
    execute_code: bool = False,
) -> Comparison:
    """Load the model, draw the items, resolve the plans.

    Args:
        preset: What to compare.
        shelf: Where models come from.
        overrides: ``--set`` strings.
        execute_code: Whether programs may be run that the model writes.

    Returns:
        The comparison.

    Raises:
        KVPolicyError: Something does not exist, or does not fit.
    """
    task = load_task(preset.task)
    if task.measure.runs_code and not execute_code:
        msg = (
            f"task '{preset.task}' is graded by running the programs that the model writes; "
            "give --execute-code to allow that (docs/how-to/run-a-benchmark.md says how far "
            "they are confined)"
        )
        raise TaskError(msg)
    items = _attempts(preset, task.items(preset.n, seed=preset.seed, split=preset.split))
    model, tokenizer = shelf.open(preset.model)
    group = Group(
        model=describe_model(preset.model, model),
        task=task,
        items=wrap(items, tokenizer),
        split=preset.split,
        sampling=Sampling(temperature=preset.temperature, top_p=preset.top_p, seed=preset.seed),
        seed=preset.seed,
        max_new_tokens=preset.max_new_tokens,
        slots=preset.slots,
    )
    cells = build_cells(
        preset.series,
        num_layers=group.model.num_layers,
        budgets=preset.budgets,
        buffer=preset.buffer,
        overrides=overrides,
        group=group.id,
    )
    return Comparison(preset.name, (group,), cells)


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


def _attempts(preset: Preset, items: Sequence[Item]) -> list[Item]:
    """Each item as often as it is to be asked."""
    if not items:
        msg = f"task '{preset.task}' has no items in its {preset.split} split"
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
