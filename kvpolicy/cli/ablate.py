"""``kvpolicy ablate``: policies at several budgets on one model, resumable at every sample.

With ``--json``, on stdout: ``{"folder", "run", "table"}``, where ``run`` is the manifest's
and ``table`` the list that is also in ``table.json``.
"""

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from kvpolicy.cli.console import say, terminal_width, write, write_json
from kvpolicy.cli.interrupt import Interrupted
from kvpolicy.cli.options import (
    Device,
    Dtype,
    Json,
    Overrides,
    Plugins,
    TrustRemoteCode,
    counts,
    register_plugins,
    words,
)

if TYPE_CHECKING:
    from kvpolicy.lab.comparison import Comparison
    from kvpolicy.lab.pool import Pool
    from kvpolicy.lab.store import Store
    from kvpolicy.lab.table import Row

app = typer.Typer(add_completion=False, rich_markup_mode=None)

SOME_FAILED = 1


class _Split(Enum):
    """Where the problems come from."""

    test = "test"
    tune = "tune"
    train = "train"


@app.command()
def ablate(
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="What to compare. [default: baselines]"),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Policies to compare instead; in A+B, B wraps A."),
    ] = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE|NAME", help="A plan to compare; may be repeated."),
    ] = None,
    budgets: Annotated[
        str | None, typer.Option(metavar="N,...", help="Rows that stay per layer and KV head.")
    ] = None,
    buffer: Annotated[
        int | None, typer.Option(min=1, help="Rows that may join before a compaction.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FOLDER", help="A bundled reasoner's name, a hub id or a local folder."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE|ID",
            help="What is asked: a task, a file or a hub id, with options as NAME:KEY=VALUE,...",
        ),
    ] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Problems for each cell.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Chooses the problems.")] = None,
    split: Annotated[
        _Split | None,
        typer.Option(help="Problems to report on, or to tune settings on. [default: test]"),
    ] = None,
    attempts: Annotated[
        int | None, typer.Option(min=1, help="Times each problem is asked, for pass@1.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the likeliest token. [default: 0]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens up to this. [default: 1]")
    ] = None,
    execute_code: Annotated[
        bool, typer.Option("--execute-code", help="Let a grader run programs the model wrote.")
    ] = False,
    slots: Annotated[int | None, typer.Option(min=1, help="Samples decoded together.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens a sample may generate.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Cells run side by side. [default: small models: one per core]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Results folder. [default: kvpolicy-ablate/NAME, one for the same settings]",
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="FACET", help="Show the table by difficulty, too.")
    ] = None,
    record: Annotated[
        int,
        typer.Option(
            min=0, help="Items of each cell, from the first, whose kept tokens are recorded."
        ),
    ] = 2,
    overrides: Overrides = None,
    plugin: Plugins = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Compare policies at several budgets: accuracy, length, memory and speed.

    `kvpolicy tasks list` shows what can be asked, and measured otherwise than by accuracy.
    Without arguments: the full cache against published policies on the bundled reasoner.
    Interrupted, the same command goes on where it stopped.
    """
    budget_list, stacks = counts("--budgets", budgets), words(policies)
    register_plugins(plugin)
    # Imported here: all this brings torch along.
    from kvpolicy.lab import setup
    from kvpolicy.lab.local import Local, num_workers
    from kvpolicy.lab.processes import stay_forkable
    from kvpolicy.lab.shelf import Shelf
    from kvpolicy.lab.store import Store

    chosen = setup.choose(
        preset, policies=stacks, plans=plan or [], budgets=budget_list, buffer=buffer
    )
    chosen = attrs.evolve(
        chosen,
        model=chosen.model if model is None else model,
        task=chosen.task if task is None else task,
        n=n or chosen.n,
        seed=chosen.seed if seed is None else seed,
        split=split.value if split else chosen.split,
        attempts=attempts or chosen.attempts,
        temperature=chosen.temperature if temperature is None else temperature,
        top_p=chosen.top_p if top_p is None else top_p,
        slots=slots or chosen.slots,
        max_new_tokens=max_new_tokens or chosen.max_new_tokens,
    )
    threads = stay_forkable()
    shelf = Shelf(dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    comparison = setup.prepare(chosen, shelf, overrides=overrides or [], execute_code=execute_code)
    setup.check_facet(comparison, by)
    comparison = attrs.evolve(comparison, record=record)
    pool = Local(comparison, shelf, num_workers(comparison, workers), threads)
    folder = output or setup.default_folder(comparison)
    with Store(folder, comparison.to_dict()) as store:
        rows = _run(comparison, store, pool, pool.workers)
        _show(comparison, store, rows, by, json=json)
    if any(row.num_errors for row in rows):
        raise typer.Exit(SOME_FAILED)


def _run(comparison: "Comparison", store: "Store", pool: "Pool", workers: int) -> "list[Row]":
    from kvpolicy.lab.publish import publish
    from kvpolicy.lab.session import describe_session

    try:
        num_left = comparison.num_left(store.samples)
        if num_left:
            store.begin(describe_session(["kvpolicy", *sys.argv[1:]], workers=workers))
        for note in store.notes:
            say(note)
        _say_what_is_done(comparison, store, num_left)
        if num_left:
            _follow(comparison, store, pool)
        return publish(comparison, store)
    except KeyboardInterrupt:
        num_done = comparison.num_samples - comparison.num_left(store.samples)
        msg = (
            f"interrupted; {num_done} of {comparison.num_samples} samples are kept in "
            f"{store.folder}, and the same command goes on from there."
        )
        raise Interrupted(msg) from None


def _say_what_is_done(comparison: "Comparison", store: "Store", num_left: int) -> None:
    total = comparison.num_samples
    if not num_left:
        say(f"all {total} samples are in {store.folder} already; nothing is computed again.")
    elif num_left < total:
        say(f"going on in {store.folder}: {total - num_left} of {total} samples are there.")
    else:
        say(f"{len(comparison.cells)} cells, {total} samples, into {store.folder}.")
    unrecorded = comparison.num_unrecorded(store.samples, store.recorded)
    if unrecorded:
        say(
            f"{unrecorded} samples of --record {comparison.record} were done without a record of "
            "what was kept, and have none; another --output makes them anew."
        )


def _follow(comparison: "Comparison", store: "Store", pool: "Pool") -> None:
    from kvpolicy.cli.progress import open_progress
    from kvpolicy.cli.tally import Tally
    from kvpolicy.lab.ablate import run

    tally = Tally(comparison, store)
    with open_progress(comparison.num_samples, tally.num_done) as progress:
        for event in run(comparison, store, pool):
            tally.count(event)
            line = tally.cell_line(event)
            if line:
                progress.keep(line)
            progress.show(tally.state_line(), tally.num_done)


def _show(
    comparison: "Comparison", store: "Store", rows: "list[Row]", by: str | None, *, json: bool
) -> None:
    from kvpolicy.cli.rows import facet_table, table
    from kvpolicy.lab.facets import break_down
    from kvpolicy.lab.table import to_json

    if json:
        write_json(
            {"folder": str(store.folder), "run": comparison.to_dict(), "table": to_json(rows)}
        )
        return
    (group,) = comparison.groups
    columns, width = group.task.measure.columns, terminal_width()
    write(table(rows, columns, width=width) + "\n")
    if by is not None:
        facets = break_down(comparison.cells, store.samples.values(), columns)
        found = [one for one in facets if one.facet == by]
        write("\n" + facet_table(found, columns, width=width) + "\n")
    say(f"table, plots, samples and manifest are in {store.folder}.")
