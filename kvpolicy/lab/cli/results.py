"""``kvpolicy results``: list, tabulate, compare and export results, also of running sweeps.

`compare` is in `kvpolicy.lab.cli.compare`. With ``--json``, `list` prints a list of
``{"folder", "name", "version", "started", "models", "tasks", "seeds", "num_cells",
"num_samples", "num_expected", "num_errors", "problem"}``, for an unreadable folder only ``folder``
and ``problem``; `table` prints the list that docs/reference/results.md describes.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.options import Json, check_new_file, examples
from kvpolicy.cli.output import format_table, info, print_json, print_text, terminal_width
from kvpolicy.errors import KVPolicyError, ResultsError
from kvpolicy.lab.cli.compare import compare
from kvpolicy.lab.cli.results_options import Budgets, Models, Runs, Seeds, SeriesNames, Tasks

if TYPE_CHECKING:
    from kvpolicy.lab.analysis.table import Row
    from kvpolicy.lab.store.read import RunFolder

app = typer.Typer(
    help="List, show, compare and export the results of runs.",
    rich_help_panel="Results",
    no_args_is_help=True,
    add_completion=False,
)


@app.command(
    "list",
    short_help="Show the runs in a folder.",
    epilog=examples(
        "kvpolicy results list",
        "kvpolicy results list runs --json",
    ),
)
def listing(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with runs, at any depth.")
    ] = Path("kvpolicy-ablate"),
    json: Json = False,
) -> None:
    """Show the runs in a folder: models, tasks, seeds and progress."""
    from kvpolicy.lab.store.read import find_runs

    found = [_summary(path) for path in find_runs(folder)]
    if json:
        print_json(found, indent=2)
        return
    for one in found:
        if one["problem"]:
            info(one["problem"])
    lines = [_list_line(one) for one in found if not one["problem"]]
    if lines:
        headers = ["run", "begun", "models", "tasks", "seeds", "cells", "samples", "failed"]
        print_text(format_table(headers, lines, right=(4, 5, 6, 7)) + "\n")
    elif not found:
        info(f"there is no run in {folder}; `kvpolicy ablate` makes one.")


@app.command(
    short_help="Show the results of runs: one row for each plan.",
    epilog=examples(
        "kvpolicy results table kvpolicy-ablate/baselines",
        "kvpolicy results table runs --by depth --csv",
    ),
)
def table(
    runs: Runs,
    by: Annotated[
        str | None, typer.Option(metavar="FACET", help="Break down by a facet, such as depth.")
    ] = None,
    series: SeriesNames = None,
    budget: Budgets = None,
    model: Models = None,
    task: Tasks = None,
    seed: Seeds = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of text.")] = False,
    json: Json = False,
) -> None:
    """Show the results of runs: accuracy or what else was measured, length, memory and speed.

    Seeds are pooled; intervals count questions, not samples. Truncated, failed and ungraded
    samples count, as wrong ones.
    """
    if csv and json:
        msg = "--csv and --json were given; give one of them."
        raise KVPolicyError(msg)
    from kvpolicy.lab.analysis.pooling import pool
    from kvpolicy.lab.analysis.select import check_facet, open_runs, select
    from kvpolicy.lab.analysis.table import csv_text, tabulate_runs, to_run_records
    from kvpolicy.lab.cli.tables import warn_incomplete

    opened = open_runs(runs)
    selection = select(opened, series=series, budgets=budget, models=model, tasks=task, seeds=seed)
    cells = pool(opened, selection.keeps)
    check_facet(cells, by)
    rows = tabulate_runs(cells, by)
    if json:
        print_json(to_run_records(rows), indent=2)
    elif csv:
        print_text(csv_text(to_run_records(rows, flat=True)))
    else:
        warn_incomplete(cells)
        print_text(_tables_text(rows))


app.command(
    short_help="Compare two cells item by item, or all with a baseline.",
    epilog=examples(
        "kvpolicy results compare runs H2O@128 R-KV@128",
        "kvpolicy results compare runs --with 'full cache'",
    ),
)(compare)


@app.command(
    short_help="Write samples as CSV or Parquet.",
    epilog=examples(
        "kvpolicy results export runs --to samples.csv",
        "kvpolicy results export runs --to samples.parquet",
    ),
)
def export(
    runs: Runs,
    to: Annotated[
        Path, typer.Option(metavar="FILE", help="A new file whose name ends in .csv or .parquet.")
    ],
    items: Annotated[
        bool, typer.Option("--items", help="Include the prompt and the answer of each item.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it exists.")
    ] = False,
    series: SeriesNames = None,
    budget: Budgets = None,
    model: Models = None,
    task: Tasks = None,
    seed: Seeds = None,
) -> None:
    """Write samples as one flat table, one row for each: CSV, or Parquet with pyarrow."""
    from kvpolicy.lab.analysis.export import check_can_write, flatten_samples, write_table
    from kvpolicy.lab.analysis.select import open_runs, select

    check_can_write(to)
    if not (overwrite and to.is_file()):
        check_new_file(to, option="--to, or give --overwrite")
    opened = open_runs(runs)
    selection = select(opened, series=series, budgets=budget, models=model, tasks=task, seeds=seed)
    flat = flatten_samples(opened, selection.keeps, items=items)
    write_table(flat, to)
    info(f"{to} has {len(flat.rows):,} samples in {len(flat.kinds)} columns.")


def _summary(path: Path) -> dict[str, Any]:
    from kvpolicy.lab.store.read import read_run

    try:
        return _describe(read_run(path))
    except ResultsError as error:
        return {"folder": str(path), "problem": str(error)}


def _describe(run: "RunFolder") -> dict[str, Any]:
    groups = run.groups.values()
    return {
        "folder": str(run.path),
        "name": run.name,
        "version": run.version,
        "started": next((one.get("started") for one in run.sessions), None),
        "models": list(dict.fromkeys(group.model for group in groups)),
        "tasks": list(dict.fromkeys(group.task for group in groups)),
        "seeds": list(dict.fromkeys(group.seed for group in groups)),
        "num_cells": len(run.cells),
        "num_samples": len(run.samples),
        "num_expected": run.num_expected,
        "num_errors": sum(one.finish_reason == "error" for one in run.samples.values()),
        "problem": None,
    }


def _list_line(summary: dict[str, Any]) -> list[str]:
    done, expected = summary["num_samples"], summary["num_expected"]
    return [
        summary["folder"],
        (summary["started"] or "-").replace("T", " ")[:16],
        ", ".join(summary["models"]),
        ", ".join(summary["tasks"]),
        ",".join(map(str, summary["seeds"])),
        f"{summary['num_cells']:,}",
        f"{done:,}" if done == expected else f"{done:,} of {expected:,}",
        f"{summary['num_errors']:,}",
    ]


def _tables_text(rows: "list[Row]") -> str:
    """One table for each set of measured columns."""
    from kvpolicy.lab.analysis.select import differing_settings, format_setting
    from kvpolicy.lab.cli.tables import facet_table
    from kvpolicy.lab.cli.tables import table as plain_table

    by_columns: dict[object, list[Row]] = {}
    for row in rows:
        by_columns.setdefault(tuple(column.name for column in row.columns), []).append(row)
    names = differing_settings([row.cell for row in rows])
    texts = []
    for some in by_columns.values():
        lay_out = plain_table if some[0].facet is None else facet_table
        labels = {name: [format_setting(row.cell, name) for row in some] for name in names}
        texts.append(lay_out(some, some[0].columns, labels=labels, width=terminal_width()) + "\n")
    return "\n".join(texts)
