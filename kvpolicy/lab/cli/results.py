"""``kvpolicy results``: list, tabulate, compare and export results, also of running sweeps.

With ``--json``, `list` prints a list of ``{"folder", "name", "version", "started", "models",
"tasks", "seeds", "num_cells", "num_samples", "num_expected", "num_errors", "problem"}``, for an
unreadable folder only ``folder`` and ``problem``. `table` prints a list, and `compare`
``{"interval": ..., "comparisons": [...]}``; docs/reference/results.md lists their fields.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.options import Json, check_new_file, examples
from kvpolicy.cli.output import info, print_exact, print_json, print_text, terminal_width
from kvpolicy.cli.text_table import format_table
from kvpolicy.errors import KVPolicyError, ResultsError
from kvpolicy.lab.analysis.compare import adjust_p_values, compare_cells, interval_method
from kvpolicy.lab.analysis.export import check_can_write, flatten_samples, write_table
from kvpolicy.lab.analysis.pooling import column_of, pool
from kvpolicy.lab.analysis.select import check_facet, find_cell, open_runs, pairs_with, select
from kvpolicy.lab.analysis.table import csv_text, tabulate_runs, to_run_records
from kvpolicy.lab.cli.tables import (
    comparisons_by_facet,
    format_progress,
    many_cells,
    tables_of_runs,
    two_cells,
    warn_incomplete,
)
from kvpolicy.lab.store.read import RunFolder, find_runs, read_run
from kvpolicy.quantities import format_count

app = typer.Typer(
    help="List, show, compare and export the results of runs.",
    rich_help_panel="Results",
    no_args_is_help=True,
    add_completion=False,
)

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold some.")
]
SeriesNames = Annotated[
    list[str] | None,
    typer.Option("--series", metavar="NAME", help="Only this series; may be repeated."),
]
Budgets = Annotated[
    list[str] | None, typer.Option(metavar="N|all", help="Only this budget; may be repeated.")
]
Models = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Only this model; may be repeated.")
]
Tasks = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Only this task; may be repeated.")
]
Seeds = Annotated[list[int] | None, typer.Option(help="Only this seed; may be repeated.")]


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
    found = [_summary(path) for path in find_runs(folder, warn=info)]
    if json:
        print_json(found, indent=2)
        return
    for one in found:
        for problem in [one["problem"]] if one["problem"] else one["missing"]:
            info(problem)
    lines = [_list_line(one) for one in found if not one["problem"]]
    if lines:
        headers = ["run", "begun", "models", "tasks", "seeds", "cells", "samples", "failed"]
        print_text(format_table(headers, lines, right=(4, 5, 6, 7), width=terminal_width()) + "\n")
    elif not found:
        info(f"there is no run in {folder}; `kvpolicy ablate` makes one.")


@app.command(
    short_help="Show the results of runs: one row for each plan.",
    epilog=examples(
        "kvpolicy results table kvpolicy-ablate/baselines",
        "kvpolicy results table runs --by depth --csv",
        "kvpolicy results table runs --latex > table.tex",
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
    latex: Annotated[
        bool, typer.Option("--latex", help="Print LaTeX, with booktabs, instead of text.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the results of runs: accuracy or what else was measured, length, memory and speed.

    Seeds are pooled; intervals count questions, not samples. Truncated, failed and ungraded
    samples count, as wrong ones.
    """
    given = {"--csv": csv, "--latex": latex, "--json": json}
    forms = [option for option, is_given in given.items() if is_given]
    if len(forms) > 1:
        msg = f"{' and '.join(forms)} were given; give one of them."
        raise KVPolicyError(msg)
    opened = open_runs(runs, warn=info)
    keep = select(opened, series=series, budgets=budget, models=model, tasks=task, seeds=seed)
    cells = pool(opened, keep)
    check_facet(cells, by)
    rows = tabulate_runs(cells, by)
    if json:
        print_json(to_run_records(rows), indent=2)
    elif csv:
        print_exact(csv_text(to_run_records(rows, flat=True)))
    else:
        warn_incomplete(cells)
        print_text(tables_of_runs(rows, terminal_width(), latex=latex))


@app.command(
    short_help="Compare two cells item by item, or all with a baseline.",
    epilog=examples(
        "kvpolicy results compare runs H2O@128 R-KV@128",
        "kvpolicy results compare runs --with 'full cache'",
        "kvpolicy results compare runs --with R-KV --with SnapKV --series H2O",
    ),
)
def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... A B", help="Runs, then two cells: SERIES@BUDGET, or digits of an id."
        ),
    ],
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="CELL|SERIES",
            help="Compare every cell with this baseline, or with a series at the same budget; "
            "may be repeated.",
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Quantity to compare, or length. [default: the first column]"
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="FACET", help="Break down by a facet, such as depth.")
    ] = None,
    items: Annotated[
        bool, typer.Option("--items", help="Show the items on which A and B differ.")
    ] = False,
    bootstrap_seed: Annotated[int, typer.Option(min=0, help="Random seed of the bootstrap.")] = 0,
    series: SeriesNames = None,
    budget: Budgets = None,
    model: Models = None,
    task: Tasks = None,
    seed: Seeds = None,
    json: Json = False,
) -> None:
    """Compare cells item by item: paired difference, its interval, and an exact test.

    A minus B, on the items of both. With --with, every other cell minus each baseline, with
    Holm's correction for the number of comparisons.
    """
    run_names, cell_names = (names, []) if with_ else (names[:-2], names[-2:])
    if not run_names:
        run = names[0] if len(names) == 1 else "RUN"
        msg = (
            f"compare was given {' '.join(names)}, which is not a run and two of its cells; write "
            f"{run} A B, cells being SERIES@BUDGET, or {run} --with CELL; `kvpolicy results table "
            f"{run}` shows the cells."
        )
        raise KVPolicyError(msg)
    if items and with_:
        msg = "--items and --with were given; items are shown for two cells: RUN A B."
        raise KVPolicyError(msg)
    runs = open_runs(run_names, warn=info)
    cells = pool(runs, select(runs, models=model, tasks=task, seeds=seed))
    check_facet(cells, by)
    # --series and --budget select what --with is compared with, not A and B or the baseline.
    is_compared = select(runs, series=series, budgets=budget)
    if not with_:
        pairs = [(find_cell(cells, cell_names[0]), find_cell(cells, cell_names[1]))]
    else:
        pairs = pairs_with(cells, with_, is_compared)
    found = []
    for a, b in pairs:
        measured = column_of(b.group, column)
        column_of(a.group, measured.name)  # raises if the first cell has no such column
        found.append(compare_cells(a, b, measured, seed=bootstrap_seed))
    if with_:
        found = adjust_p_values(found)
    method = interval_method(found, seed=bootstrap_seed)
    if json:
        records = [one.to_json(by=by, items=items, seed=bootstrap_seed) for one in found]
        print_json({"interval": method, "comparisons": records}, indent=2)
        return
    warn_incomplete(list(dict.fromkeys(cell for pair in pairs for cell in pair)))
    if not with_:
        width = terminal_width()
        print_text(two_cells(found[0], items=items, width=width, seed=bootstrap_seed))
    else:
        print_text(many_cells(found, width=terminal_width()))
    if by is not None:
        width = terminal_width()
        print_text(comparisons_by_facet(found, by, seed=bootstrap_seed, width=width))
    info(f"intervals: {method}.")


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
    check_can_write(to)
    if not (overwrite and to.is_file()):
        check_new_file(to, option="--to, or replace a file with --overwrite")
    opened = open_runs(runs, warn=info)
    keep = select(opened, series=series, budgets=budget, models=model, tasks=task, seeds=seed)
    flat = flatten_samples(opened, keep, items=items)
    write_table(flat, to)
    info(
        f"{to} has {format_count(len(flat.rows), 'sample')} in "
        f"{format_count(len(flat.kinds), 'column')}."
    )


def _summary(path: Path) -> dict[str, Any]:
    try:
        return _describe(read_run(path))
    except ResultsError as error:
        return {"folder": str(path), "problem": str(error), "missing": []}


def _describe(run: RunFolder) -> dict[str, Any]:
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
        "missing": run.problems,
    }


def _list_line(summary: dict[str, Any]) -> list[str]:
    return [
        summary["folder"],
        (summary["started"] or "-").replace("T", " ")[:16],
        ", ".join(summary["models"]),
        ", ".join(summary["tasks"]),
        ",".join(map(str, summary["seeds"])),
        f"{summary['num_cells']:,}",
        format_progress(summary["num_samples"], summary["num_expected"]),
        f"{summary['num_errors']:,}",
    ]
