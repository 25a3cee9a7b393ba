"""From what a user asks for to a comparison that can be run."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import attrs
import torch

from kvpolicy.discovery import nearest
from kvpolicy.errors import KVPolicyError, TaskError
from kvpolicy.lab.ablate import Comparison
from kvpolicy.lab.chat import wrap
from kvpolicy.lab.grid import build_cells, series_of_file, series_of_stack
from kvpolicy.lab.models import open_model
from kvpolicy.lab.pool import Pool, ThisProcess
from kvpolicy.lab.presets import DEFAULT_PRESET, Preset, Series, load_preset
from kvpolicy.lab.processes import CAN_FORK, Processes
from kvpolicy.lab.serving import Server
from kvpolicy.lab.session import num_cpus
from kvpolicy.lab.tasks import Item, load_task
from kvpolicy.request import Sampling

_SMALL = 100_000_000  # parameters; a larger model keeps all cores busy by itself


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
    *,
    overrides: Sequence[str] = (),
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    execute_code: bool = False,
) -> Comparison:
    """Load the model, draw the items, resolve the plans.

    Args:
        preset: What to compare.
        overrides: ``--set`` strings.
        dtype: Precision of the model.
        device: Where the model is put.
        trust_remote_code: Whether to run code that comes with the model.
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
    model, tokenizer = open_model(
        preset.model, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    cells = build_cells(
        preset.series,
        num_layers=model.config.get_text_config(decoder=True).num_hidden_layers,
        budgets=preset.budgets,
        buffer=preset.buffer,
        overrides=overrides,
    )
    return Comparison(
        model=model,
        tokenizer=tokenizer,
        model_name=preset.model,
        task=task,
        items=wrap(items, tokenizer),
        split=preset.split,
        sampling=Sampling(temperature=preset.temperature, top_p=preset.top_p, seed=preset.seed),
        cells=cells,
        seed=preset.seed,
        max_new_tokens=preset.max_new_tokens,
        slots=preset.slots,
    )


def check_facet(comparison: Comparison, facet: str | None) -> None:
    """Refuse a facet that no item has, before anything is computed.

    Args:
        comparison: What is to be run.
        facet: What the table is to be broken down by, if by anything.

    Raises:
        TaskError: No item has it.
    """
    known = dict.fromkeys(name for item in comparison.items for name in item.facets)
    if facet is not None and facet not in known:
        msg = f"the items of task '{comparison.task.name}' have no '{facet}'"
        raise TaskError(msg + nearest(facet, known))


def default_folder(preset: Preset, comparison: Comparison) -> Path:
    """A results folder whose name is the same for the same run, and for no other.

    Args:
        preset: Gives the name.
        comparison: Gives the digest.
    """
    digest = hashlib.sha256(json.dumps(comparison.to_dict(), sort_keys=True).encode()).hexdigest()
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in preset.name)[:60]
    return Path("kvpolicy-ablate") / f"{name}-{digest[:8]}"


def num_workers(comparison: Comparison, wanted: int | None) -> int:
    """Decide how many processes run cells side by side.

    Args:
        comparison: What is run.
        wanted: What the user asks for, if anything.

    Returns:
        The number; 1 means this process.

    Raises:
        KVPolicyError: More than one is wanted where this is not possible.
    """
    can = CAN_FORK and comparison.model.device.type == "cpu"
    if wanted is not None:
        if wanted > 1 and not can:
            msg = f"{wanted} workers need Linux and a model on the CPU; leave --workers out."
            raise KVPolicyError(msg)
        return wanted
    num_parameters = sum(parameter.numel() for parameter in comparison.model.parameters())
    return min(num_cpus(), len(comparison.cells)) if can and num_parameters < _SMALL else 1


def open_pool(
    comparison: Comparison, workers: int, *, threads: int
) -> AbstractContextManager[Pool]:
    """Make ready who runs the cells.

    With several workers, nothing may have been computed with more than one thread before:
    torch's pool of threads does not survive forking.

    Args:
        comparison: What is run.
        workers: Processes side by side, of one thread each; 1 means this one.
        threads: Threads of this process, if it works alone.

    Returns:
        The pool, for a ``with`` block.
    """
    server = Server(
        model=comparison.model,
        tokenizer=comparison.tokenizer,
        plans=[cell.plan for cell in comparison.cells],
        items=comparison.items,
        measure=comparison.task.measure,
        sampling=comparison.sampling,
        slots=comparison.slots,
        max_new_tokens=comparison.max_new_tokens,
    )
    if workers > 1:
        return Processes(server.serve, workers)
    torch.set_num_threads(threads)
    return nullcontext(ThisProcess(server.serve))


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
