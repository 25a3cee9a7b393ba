"""``kvpolicy ablate``: run a sweep, resumable at every sample.

With ``--json``, on stdout: ``{"folder", "run", "table"}``, where ``run`` is the manifest's and
``table`` is the list that is also in ``table.json``. With ``--dry-run``: ``run``, ``folder``, the
counts ``cells``, ``samples``, ``left`` and ``workers``, the same by setting in ``groups``, and
``table`` with one row for each cell.
"""

import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import attrs
import typer

from kvpolicy.cli.failures import Interrupted
from kvpolicy.cli.options import (
    Buffer,
    Compile,
    CpuWeights,
    Device,
    Dtype,
    Json,
    Overrides,
    Plugins,
    PrefillBuffer,
    TrustRemoteCode,
    WeightForm,
    Where,
    examples,
    parse_ints,
    parse_names,
    register_plugins,
)
from kvpolicy.cli.output import Progress, info, print_json, print_lines, print_text, terminal_width
from kvpolicy.cli.text_table import format_table
from kvpolicy.lab.cli import options
from kvpolicy.quantities import format_bytes, format_count, format_seconds, parse_bytes

if TYPE_CHECKING:
    from kvpolicy.lab.store.records import Sample
    from kvpolicy.lab.store.store import Store
    from kvpolicy.lab.sweep.grid import Cell, EvalSetting, Sweep
    from kvpolicy.lab.sweep.jobs import Executor
    from kvpolicy.lab.sweep.publish import Panel
    from kvpolicy.lab.sweep.runner import CellDone, CellProgress

app = typer.Typer(
    help="Compare policies at several budgets.",
    rich_help_panel="Experiments",
    add_completion=False,
)

SOME_FAILED = 1


@app.command(
    epilog=examples(
        "kvpolicy ablate",
        "kvpolicy ablate --policies h2o,snapkv --budgets 96,128 --n 20",
        "kvpolicy ablate --policies full,h2o --rows model,int8 --bytes 256KiB",
    )
)
def ablate(
    preset: options.PresetName = None,
    policies: options.Stacks = None,
    plan: options.Plans = None,
    budgets: options.Budgets = None,
    num_bytes: options.Bytes = None,
    rows: options.Rows = None,
    grid: options.Grid = None,
    zip_lists: options.Zip = False,
    buffer: Buffer = None,
    prefill_buffer: PrefillBuffer = None,
    model: options.Models = None,
    task: options.Tasks = None,
    n: options.NumExamples = None,
    seeds: options.Seeds = None,
    split: options.Split = None,
    attempts: options.Attempts = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    execute_code: options.ExecuteCode = False,
    slots: options.Slots = None,
    max_new_tokens: options.MaxNewTokens = None,
    workers: options.Workers = None,
    on: options.On = Where.here,
    ray_address: options.RayAddress = None,
    cpus_per_worker: options.CpusPerWorker = None,
    gpus_per_worker: options.GpusPerWorker = None,
    output: options.Output = None,
    by: options.By = None,
    record: options.Record = 2,
    dry_run: options.DryRun = False,
    overrides: Overrides = None,
    plugin: Plugins = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    cpu_weights: CpuWeights = WeightForm.plain,
    compile: Compile = False,
    json: Json = False,
) -> None:
    """Compare policies at several budgets: accuracy, length, memory and speed.

    Without arguments: the default sweep. Unset options come from the preset; see
    docs/reference/sweeps.md. `kvpolicy tasks list` shows the tasks. If interrupted, run the same
    command again: it continues after the last finished sample.
    """
    budget_list = parse_ints("--budgets", budgets)
    byte_list = [parse_bytes("--bytes", one) for one in parse_names("--bytes", num_bytes)]
    seed_list = parse_ints("--seeds", seeds, minimum=0)
    knobs = options.parse_grid(grid or [], rows)
    register_plugins(plugin)
    # Imported here because these import torch.
    from kvpolicy.lab.executors.executor import open_executor
    from kvpolicy.lab.models import ModelCache
    from kvpolicy.lab.store.store import Store
    from kvpolicy.lab.sweep.prepare import (
        build_sweep,
        check_facet,
        default_folder,
        load_sweep,
        not_sampled,
    )

    config = load_sweep(
        preset,
        policies=parse_names("--policies", policies),
        plans=plan or [],
        budgets=tuple(budget_list) or None,
        bytes=tuple(byte_list) or None,
        buffer=buffer,
        prefill_buffer=prefill_buffer,
        models=tuple(model or ()) or None,
        tasks=tuple(task or ()) or None,
        seeds=tuple(seed_list) or None,
        knobs=knobs,
        combine="zip" if zip_lists else None,
        n=n,
        split=split.value if split else None,
        attempts=attempts,
        temperature=temperature,
        top_p=top_p,
        slots=slots,
        max_new_tokens=max_new_tokens,
    )
    with open_executor(
        on.value,
        ModelCache(
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            cpu_weights=cpu_weights.value,
            compile=compile,
        ),
        address=ray_address,
        workers=workers,
        cpus=cpus_per_worker,
        gpus=gpus_per_worker,
        info=info,
    ) as executor:
        sweep = build_sweep(config, executor, overrides=overrides or [], execute_code=execute_code)
        check_facet(sweep, by)
        for name in not_sampled(config):
            info(
                f"{name} samples nothing: --temperature, --top-p and --attempts do not apply to it."
            )
        sweep = attrs.evolve(sweep, record=record)
        folder = output or default_folder(sweep)
        if dry_run:
            _dry_run(sweep, folder, executor.num_workers(sweep), json=json)
            return
        with Store(folder, sweep.to_dict(), sweep.example_records()) as store:
            _run(sweep, store, executor)
            failed = _publish(sweep, store, by, json=json)
    if failed:
        raise typer.Exit(SOME_FAILED)


def _dry_run(sweep: "Sweep", folder: Path, workers: int, *, json: bool) -> None:
    """List the cells and the samples that are left to do; write nothing to disk."""
    from kvpolicy.lab.store.store import finished
    from kvpolicy.lab.sweep.runner import finished_keys

    samples, recorded = finished(folder, sweep.to_dict(), sweep.example_records())
    for note in [*_chats(sweep), *_no_effects(sweep)]:
        info(note)
    cells = _list_cells(sweep, finished_keys(sweep, samples, recorded))
    totals = _totals(cells)
    if json:
        names = ("model", "task", "seed")
        by_setting = [
            {**dict(zip(names, values, strict=True)), **_totals(list(rows))}
            for values, rows in groupby(cells, key=itemgetter(*names))
        ]
        place = {"run": sweep.name, "folder": str(folder), "workers": workers}
        print_json({**place, **totals, "groups": by_setting, "table": cells})
        return
    rows = [
        [
            Path(cell["model"]).name,
            cell["task"],
            str(cell["seed"]),
            cell["series"],
            "all" if cell["budget"] is None else f"{cell['budget']:g}",
            format_bytes(cell["bytes_per_sequence"]),
            str(cell["samples"]),
            str(cell["left"]),
        ]
        for cell in cells
    ]
    headers = ["model", "task", "seed", "policy", "budget", "bytes/seq", "samples", "left"]
    print_text(format_table(headers, rows, right=(2, 4, 5, 6, 7), width=terminal_width()) + "\n\n")
    num_done = totals["samples"] - totals["left"]
    where = f"{num_done} of them done in {folder}" if num_done else f"into {folder}"
    side_by_side = f", with {workers} workers" if workers > 1 else ""
    cells_and_samples = _count(totals["cells"], totals["samples"])
    print_text(f"{cells_and_samples}, {where}{side_by_side}.\n")
    print_text("Nothing was written.\n")


def _count(num_cells: int, num_samples: int) -> str:
    return f"{format_count(num_cells, 'cell')}, {format_count(num_samples, 'sample')}"


def _list_cells(sweep: "Sweep", done: Container[str]) -> list[dict[str, Any]]:
    """Describe each cell, with the number of its samples and of those left to do."""
    found = []
    for cell in sweep.cells:
        setting = sweep.setting_of(cell)
        found.append(
            {
                "model": setting.model.name,
                "task": setting.task.name,
                "seed": setting.seed,
                "series": cell.series,
                "budget": cell.budget,
                "bytes_per_sequence": cell.bytes_per_sequence,
                "samples": len(setting.examples),
                "left": len(sweep.remaining(cell, done)),
            }
        )
    return found


def _totals(cells: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    sums = {key: sum(cell[key] for cell in cells) for key in ("samples", "left")}
    return {"cells": len(cells), **sums}


def _run(sweep: "Sweep", store: "Store", executor: "Executor") -> None:
    """Run what is left of a sweep and show the progress on stderr.

    Raises:
        Interrupted: By Ctrl-C; the message says what is kept.
    """
    from kvpolicy.lab.sandbox.run import find_wall
    from kvpolicy.lab.store.session import describe_session
    from kvpolicy.lab.sweep.runner import finished_keys

    done = finished_keys(sweep, store.samples, store.recorded)
    try:
        num_left = sweep.num_remaining(done)
        if num_left:
            command = ["kvpolicy", *sys.argv[1:]]
            workers, machine = executor.num_workers(sweep), executor.machine(sweep)
            session = describe_session(
                command, workers=workers, record=sweep.record, machine=machine
            )
            if any(setting.task.metric.runs_code for setting in sweep.settings):
                session["sandbox"] = find_wall().name
                info(f"Programs that the model writes run in {session['sandbox']}.")
            store.begin(session)
        for note in [*store.notes, *_chats(sweep), *_no_effects(sweep)]:
            info(note)
        _print_start(sweep, store, num_left)
        if num_left:
            _run_jobs(sweep, store, executor, done)
            if workers > 1:
                info(
                    f"{workers} workers have run side by side, fewer at the end: compare tok/s of "
                    "runs with --workers 1."
                )
    except KeyboardInterrupt:
        num_done = sweep.num_samples - sweep.num_remaining(store.samples)
        msg = (
            f"interrupted; {num_done} of {sweep.num_samples} samples are kept in "
            f"{store.folder}; run the same command again to continue."
        )
        raise Interrupted(msg) from None


def _chats(sweep: "Sweep") -> list[str]:
    """Which models get the questions of a task in their chat template."""
    found = (
        f"questions of {setting.task.name} are put into the chat template of "
        f"{Path(setting.model.name).name}{_without_chat(setting)}."
        for setting in sweep.settings
        if any(example.message is not None for example in setting.examples)
    )
    return list(dict.fromkeys(found))


def _without_chat(setting: "EvalSetting") -> str:
    """How to leave the template out; a task with system prompts has none without it."""
    if any(example.system is not None for example in setting.examples):
        return ""
    return "; chat=false in the task's options leaves it out"


def _no_effects(sweep: "Sweep") -> list[str]:
    """What in the plans of a sweep changes nothing, said once for all budgets."""
    from kvpolicy.plan.no_effect import without_effect

    found = (
        f"{cell.series}: {sentence}."
        for cell in sweep.cells
        for sentence in without_effect(cell.resolved)
    )
    return list(dict.fromkeys(found))


def _print_start(sweep: "Sweep", store: "Store", num_left: int) -> None:
    total = sweep.num_samples
    if not num_left:
        info(f"all {total} samples are in {store.folder} already; nothing is computed again.")
    elif num_left < total:
        info(f"continuing in {store.folder}: {total - num_left} of {total} samples are done.")
    else:
        info(f"{_count(len(sweep.cells), total)}, into {store.folder}.")
    unrecorded = sweep.unrecorded(store.recorded) & store.samples.keys()
    if unrecorded:
        info(
            f"{len(unrecorded)} samples of --record {sweep.record} have no record of kept tokens; "
            "they are run again to make it."
        )


def _run_jobs(sweep: "Sweep", store: "Store", executor: "Executor", done: Container[str]) -> None:
    from kvpolicy.lab.sweep.runner import CellProgress, SampleDone, run

    status = _Status(sweep, [one for key, one in store.samples.items() if key in done])
    with Progress(sweep.num_samples, status.num_done) as progress:
        for event in run(sweep, store, executor):
            if isinstance(event, SampleDone):
                status.add(event.sample)
            elif isinstance(event, CellProgress):
                status.go_on(event)
            else:
                progress.log(status.cell_line(event))
            progress.update(status.line(), status.num_done, share=status.share_done())


class _Status:
    """How far each cell is, and the mean value of finished cells.

    A mean of some samples would mislead: short answers end first, and long ones are wrong more
    often.
    """

    def __init__(self, sweep: "Sweep", done: Iterable["Sample"]) -> None:
        # Imported here because it belongs to a package that imports torch.
        from kvpolicy.lab.sweep.pace import Pace

        self._sweep = sweep
        self._sizes = {cell.id: len(sweep.setting_of(cell).examples) for cell in sweep.cells}
        self._done = dict.fromkeys(self._sizes, 0)
        self._tokens: dict[str, int] = {}  # of the cells that this run has begun
        self._values: dict[str, list[float]] = {id: [] for id in self._sizes}
        before = [sample for sample in done if sample.cell in self._sizes]
        self._pace = Pace(self._sizes, [(one.cell, one.num_tokens) for one in before])
        for sample in before:
            self._count(sample)

    @property
    def num_done(self) -> int:
        """Finished samples of all cells."""
        return sum(self._done.values())

    def add(self, sample: "Sample") -> None:
        """Count a finished sample of this run."""
        self._count(sample)
        self._pace.end_sample(sample.cell, sample.num_tokens)

    def go_on(self, progress: "CellProgress") -> None:
        """Note how far a cell is."""
        self._tokens[progress.cell.id] = progress.num_tokens
        self._pace.go_on(progress.cell.id, progress.num_tokens)

    def share_done(self) -> float | None:
        """Share of this run's work that is done; ``None`` until a sample has ended."""
        return self._pace.share

    def cell_line(self, done: "CellDone") -> str:
        """Describe a finished cell."""
        seconds = format_seconds(done.elapsed_s, done.compile_s)
        return f"{self._cells_done()}  {self._describe(done.cell)} in {seconds}"

    def line(self) -> str:
        """Describe the cells that are running."""
        running = [
            cell
            for cell in self._sweep.cells
            if cell.id in self._tokens and self._done[cell.id] < self._sizes[cell.id]
        ]
        cells = "; ".join(self._describe(cell) for cell in running)
        return f"{self._cells_done().strip()} cells{', ' if cells else ''}{cells}"

    def _count(self, sample: "Sample") -> None:
        self._done[sample.cell] += 1
        setting = self._sweep.setting_of(self._sweep.cell(sample.cell))
        value = setting.task.metric.columns[0].value(sample)
        self._values[sample.cell] += [] if value is None else [value]

    def _cells_done(self) -> str:
        total = len(self._sizes)
        num_done = sum(self._done[id] == size for id, size in self._sizes.items())
        return f"{num_done:>{len(str(total))}}/{total}"

    def _describe(self, cell: "Cell") -> str:
        done, size, budget = self._done[cell.id], self._sizes[cell.id], cell.budget
        at = "" if budget is None else f" at {budget:g}"
        found = self._value(cell) if done == size else f"{done}/{size}"
        if done < size and (tokens := self._tokens.get(cell.id)):
            found += f", {tokens:,} tokens"
        return f"{self._where(cell)}{cell.series}{at}: {found}"

    def _where(self, cell: "Cell") -> str:
        """Model, task and seed, as far as the settings of the sweep differ in them."""
        mine, settings = self._sweep.setting_of(cell), self._sweep.settings
        names = [
            (Path(one.model.name).name, one.task.name, f"seed {one.seed}")
            for one in [mine, *settings]
        ]
        differing = [column[0] for column in zip(*names, strict=True) if len(set(column)) > 1]
        return f"{', '.join(differing)}: " if differing else ""

    def _value(self, cell: "Cell") -> str:
        values, size = self._values[cell.id], self._sizes[cell.id]
        column = self._sweep.setting_of(cell).task.metric.columns[0]
        if not values:
            return f"{size} failed"
        return f"{column.title} {column.format(fmean(values))} over {size}"


def _publish(sweep: "Sweep", store: "Store", by: str | None, *, json: bool) -> bool:
    """Write and print the tables; return whether any sample failed."""
    from kvpolicy.lab.sweep.publish import publish, to_json

    panels = publish(sweep, store, by)
    if json:
        run = sweep.to_dict()
        print_json({"folder": str(store.folder), "run": run, "table": to_json(panels)})
    else:
        _print_tables(panels, by)
        info(f"table, plots, samples and manifest are in {store.folder}.")
    for note in _nothing_evicted(sweep, store):
        info(note)
    failed = [one for one in store.samples.values() if one.finish_reason == "error"]
    if failed:
        info(f"{format_count(len(failed), 'sample')} failed; the first: {failed[0].error}")
    return bool(failed)


def _nothing_evicted(sweep: "Sweep", store: "Store") -> list[str]:
    """The cells whose policies had nothing to evict, so that they are runs of the full cache."""
    from kvpolicy.engine.requests.savings import nothing_evicted

    evicted, longest = Counter[str](), Counter[str]()
    for sample in store.samples.values():
        evicted[sample.cell] += sample.rows_evicted
        longest[sample.cell] = max(longest[sample.cell], sample.peak_rows)
    notes = []
    for cell in sweep.cells:
        note = nothing_evicted(cell.resolved, evicted[cell.id], longest[cell.id], _option)
        if note is not None:
            at = "" if cell.budget is None else f" at {cell.budget:g}"
            notes.append(f"{cell.series}{at}: {note}.")
    return notes


def _option(key: str, value: int) -> str:
    return f"--{'budgets' if key == 'budget' else key} {value}"


def _print_tables(panels: "list[Panel]", by: str | None) -> None:
    from kvpolicy.lab.cli.tables import table

    width = terminal_width()
    for number, panel in enumerate(panels):
        if len(panels) > 1:
            print_lines([*([""] if number else []), panel.title])
        print_text(table(panel.rows, panel.columns, width=width) + "\n")
        found = [one for one in panel.facets if one.facet == by]
        if found:
            print_text("\n" + table(found, panel.columns, width=width) + "\n")
