"""``kvpolicy results compare``: two cells item by item, or all cells with one.

With ``--json``: ``{"comparisons": [...], "interval": ...}``; the fields of a comparison are those
of docs/reference/results.md.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.cli.options import Json
from kvpolicy.cli.output import info, print_json, print_text
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.cli.resultsoptions import Budgets, Models, Seeds, Series, Tasks

if TYPE_CHECKING:
    from kvpolicy.lab.analysis.compare import Contrast
    from kvpolicy.lab.analysis.pooling import PooledCell


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... A B", help="Runs, then two cells: SERIES@BUDGET, or digits of an id."
        ),
    ],
    with_: Annotated[
        str | None,
        typer.Option("--with", metavar="CELL", help="Compare all cells of the runs with this one."),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What to compare, or length. [default: the first]"),
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="FACET", help="Break down by difficulty, or the like.")
    ] = None,
    items: Annotated[
        bool, typer.Option("--items", help="Show the items on which A and B part.")
    ] = False,
    bootstrap_seed: Annotated[int, typer.Option(min=0, help="Of the resampling of items.")] = 0,
    series: Series = None,
    budget: Budgets = None,
    model: Models = None,
    task: Tasks = None,
    seed: Seeds = None,
    json: Json = False,
) -> None:
    """Compare cells item by item: paired difference, its interval, and an exact test.

    A less B, on the items that both have. With --with, every other cell less that one, with
    Holm's correction for the number of comparisons.
    """
    from kvpolicy.lab.analysis.compare import adjust
    from kvpolicy.lab.analysis.naming import find_cell, pairs_with
    from kvpolicy.lab.analysis.pooling import pool
    from kvpolicy.lab.analysis.select import check_facet, open_runs, select
    from kvpolicy.lab.cli.contrasts import by_facets, how_drawn, many_cells, plain, two_cells
    from kvpolicy.lab.cli.gaps import say_what_lacks

    names, pair = (words, []) if with_ is not None else (words[:-2], words[-2:])
    if not names:
        msg = "compare was given no run; write RUN A B, or RUN --with CELL."
        raise KVPolicyError(msg)
    if items and with_ is not None:
        msg = "--items and --with were given; items are shown of two cells: RUN A B."
        raise KVPolicyError(msg)
    opened = open_runs(names)
    wanted = select(opened, series=series, budgets=budget, models=model, tasks=task, seeds=seed)
    # A and B are looked for whatever their series: --series says which cells --with is for.
    cells = pool(opened, wanted.of_any_plan().keeps)
    check_facet(cells, by)
    if with_ is None:
        pairs = [(find_cell(cells, pair[0]), find_cell(cells, pair[1]))]
    else:
        pairs = pairs_with(cells, with_)
        pairs = [(a, b) for a, b in pairs if wanted.keeps(a.group, a.cell)]
    found = [_compare(a, b, column, bootstrap_seed) for a, b in pairs]
    if with_ is not None:
        found = adjust(found)
    if json:
        print_json(plain(found, by, items=items, seed=bootstrap_seed), indent=2)
    else:
        say_what_lacks(list(dict.fromkeys(cell for pair in pairs for cell in pair)))
        text = two_cells(found[0], items=items) if with_ is None else many_cells(found)
        print_text(text + (by_facets(found, by, bootstrap_seed) if by is not None else ""))
        info(f"intervals: {how_drawn(bootstrap_seed)}.")


def _compare(a: "PooledCell", b: "PooledCell", name: str | None, seed: int) -> "Contrast":
    from kvpolicy.lab.analysis.compare import contrast
    from kvpolicy.lab.analysis.storedcolumns import column_of

    column = column_of(b.group, name)
    column_of(a.group, column.name)  # or is refused
    return contrast(a, b, column, seed=seed)
