"""``kvpolicy results``: what finished and running ablations have found.

`compare` is in `kvpolicy.lab.cli.compare`. With ``--json``, `list` prints a list of
``{"folder", "name", "version", "started", "models", "tasks", "seeds", "num_cells",
"num_samples", "num_expected", "num_errors", "problem"}``, of a folder that cannot be read
``folder`` and ``problem`` only; `table` prints the list that docs/reference/results.md describes.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.options import Json, check_new_file, examples
from kvpolicy.cli.output import format_table, info, print_json, print_text, terminal_width
from kvpolicy.errors import KVPolicyError, ResultsError
from kvpolicy.lab.cli.compare import compare
from kvpolicy.lab.cli.resultsoptions import Budgets, Models, Runs, Seeds, Series, Tasks

if TYPE_CHECKING:
    from kvpolicy.lab.analysis.pooledtable import PooledRow
    from kvpolicy.lab.store.read import RunFolder

app = typer.Typer(
    help="List, show, compare and export the results of runs.",
    rich_help_panel="Results",
    no_args_is_help=True,
    add_completion=False,
)


@app.command(
    "list",
    short_help="Show the runs below a folder.",
    epilog=examples(
        "kvpolicy results list",
        "kvpolicy results list runs --json",
    ),
)
def listing(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where runs are, at any depth.")
    ] = Path("kvpolicy-ablate"),
    json: Json = False,
) -> None:
    """Show the runs below a folder: what they ask of whom, and how far they are."""
    from kvpolicy.lab.store.read import find_runs

    found = [_summary(path) for path in find_runs(folder)]
    if json:
        print_json(found, indent=2)
        return
    for one in found:
        if one.get("problem"):
            info(one["problem"])
    rows = [_listed(one) for one in found if not one.get("problem")]
    if rows:
        headers = ["run", "begun", "models", "tasks", "seeds", "cells", "samples", "failed"]
        print_text(format_table(headers, rows, right=(4, 5, 6, 7)) + "\n")
    elif not found:
        info(f"there is no run below {folder}; `kvpolicy ablate` makes one.")


@app.command(
    short_help="Show what runs found: one row for each plan.",
    epilog=examples(
        "kvpolicy results table kvpolicy-ablate/baselines",
        "kvpolicy results table runs --by depth --csv",
    ),
)
def table(
    runs: Runs,
    by: Annotated[
        str | None, typer.Option(metavar="FACET", help="Break down by difficulty, or the like.")
    ] = None,
    series: Series = None,
    budget: Budgets = None,
    model: Models = None,
    task: Tasks = None,
    seed: Seeds = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of text.")] = False,
    json: Json = False,
) -> None:
    """Show what runs found: accuracy or what else was measured, length, memory and speed.

    Seeds are taken together; intervals count questions, not samples. Samples that were cut
    off, failed or could not be graded are counted, and are not right.
    """
    if csv and json:
        msg = "--csv and --json were given; one of them is wanted."
        raise KVPolicyError(msg)
    from kvpolicy.lab.analysis.pooledtable import (
        break_down_pooled,
        tabulate_pooled,
        to_csv,
        to_plain,
    )
    from kvpolicy.lab.analysis.pooling import pool
    from kvpolicy.lab.analysis.select import check_facet, open_runs, select
    from kvpolicy.lab.cli.gaps import say_what_lacks

    opened = open_runs(runs)
    wanted = select(opened, series=series, budgets=budget, models=model, tasks=task, seeds=seed)
    cells = pool(opened, wanted.keeps)
    check_facet(cells, by)
    rows = tabulate_pooled(cells) if by is None else break_down_pooled(cells, by)
    if json:
        print_json(to_plain(rows), indent=2)
    elif csv:
        print_text(to_csv(rows))
    else:
        say_what_lacks(cells)
        print_text(_text(rows))


app.command(
    short_help="Compare two cells item by item, or all with one.",
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
        bool, typer.Option("--items", help="With the prompt and the answer of each item.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it is there.")
    ] = False,
    series: Series = None,
    budget: Budgets = None,
    model: Models = None,
    task: Tasks = None,
    seed: Seeds = None,
) -> None:
    """Write samples as one flat table, one row for each: CSV, or Parquet with pyarrow."""
    from kvpolicy.lab.analysis.export import flatten
    from kvpolicy.lab.analysis.flattable import check_can_write, write_table
    from kvpolicy.lab.analysis.select import open_runs, select

    check_can_write(to)
    if not (overwrite and to.is_file()):
        check_new_file(to, option="--to, or give --overwrite")
    opened = open_runs(runs)
    wanted = select(opened, series=series, budgets=budget, models=model, tasks=task, seeds=seed)
    flat = flatten(opened, wanted.keeps, items=items)
    write_table(flat, to)
    info(f"{len(flat.rows):,} samples of {len(flat.kinds)} columns are in {to}.")


def _summary(path: Path) -> dict[str, Any]:
    from kvpolicy.lab.store.read import read_run

    try:
        return _about(read_run(path))
    except ResultsError as error:
        return {"folder": str(path), "problem": str(error)}


def _about(run: "RunFolder") -> dict[str, Any]:
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


def _listed(about: dict[str, Any]) -> list[str]:
    done, expected = about["num_samples"], about["num_expected"]
    return [
        about["folder"],
        (about["started"] or "-").replace("T", " ")[:16],
        ", ".join(about["models"]),
        ", ".join(about["tasks"]),
        ",".join(map(str, about["seeds"])),
        f"{about['num_cells']:,}",
        f"{done:,}" if done == expected else f"{done:,} of {expected:,}",
        f"{about['num_errors']:,}",
    ]


def _text(rows: "list[PooledRow]") -> str:
    """One table for everything that is measured in the same columns."""
    from kvpolicy.lab.analysis.facets import FacetRow
    from kvpolicy.lab.analysis.naming import differing, setting
    from kvpolicy.lab.cli.rows import facet_table
    from kvpolicy.lab.cli.rows import table as plain_table

    tables: dict[object, list[PooledRow]] = {}
    for row in rows:
        tables.setdefault(tuple(column.name for column in row.columns), []).append(row)
    names, width = differing([row.cell for row in rows]), terminal_width()
    texts = []
    for some in tables.values():
        measured = some[0].columns
        labels = {name: [setting(row.cell, name) for row in some] for name in names}
        if some[0].facet is None:
            text = plain_table([row.row for row in some], measured, labels=labels, width=width)
        else:
            parts = [FacetRow(some[0].facet, row.value, row.row) for row in some]
            text = facet_table(parts, measured, labels=labels, width=width)
        texts.append(text + "\n")
    return "\n".join(texts)
