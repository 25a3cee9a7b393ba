"""``kvpolicy plot``: one quantity of runs as a figure for a paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.cli.options import examples
from kvpolicy.cli.output import info
from kvpolicy.errors import KVPolicyError, ResultsError
from kvpolicy.lab.cli.report import Runs, read_runs

if TYPE_CHECKING:
    from kvpolicy.lab.report.gather import CellView, GroupView

app = typer.Typer(
    help="Draw a figure of runs for a paper.",
    rich_help_panel="Results",
    add_completion=False,
)

FRONTIER = "frontier"


@app.command(
    epilog=examples(
        "kvpolicy plot kvpolicy-ablate/baselines --to accuracy.svg",
        "kvpolicy plot runs --quantity frontier --to frontier.pdf",
    )
)
def plot(
    runs: Runs,
    to: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The figure: .svg, .pdf or .png; it is replaced."),
    ],
    quantity: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="accuracy or what else the task measures, length, peak_bytes (the mean over "
            "samples), peak_kv_bytes, throughput, speed, or frontier. [default: what the task "
            "measures]",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which model, if the runs have several.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which task, if the runs have several.")
    ] = None,
    series: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A series to draw; may be repeated. [default: all]"),
    ] = None,
    width: Annotated[
        str,
        typer.Option(metavar="column|page|INCHES", help="3.3 or 6.9 inches, or as many as given."),
    ] = "column",
    height: Annotated[
        float | None,
        typer.Option(min=0.5, metavar="INCHES", help="[default: 0.7 of the width, 2.6 at most]"),
    ] = None,
    font_size: Annotated[float, typer.Option(min=1, metavar="POINTS")] = 8.0,
) -> None:
    """Draw one quantity against the budget, or the frontier of quality and memory, for a paper.

    Without a title, for captions have one. Seeds are taken together. The same runs give the
    same file.
    """
    inches = _inches(width)
    # Imported here: all this brings torch along.
    from kvpolicy.lab.plots import paper
    from kvpolicy.lab.report.gather import pooled
    from kvpolicy.lab.report.metrics import MEMORY, quantities

    view = _choose(pooled(read_runs(runs)), model, task)
    known = {one.name: one for one in quantities(view.group)}
    first = next(iter(known))
    name = quantity or first
    if name not in (*known, FRONTIER):
        msg = f"--quantity was given {name!r}; here are {', '.join([*known, FRONTIER])}."
        raise KVPolicyError(msg)
    cells = _of_series(view, series or [])
    size = paper.Size(inches, height or min(0.7 * inches, 2.6), font_size)
    if name == FRONTIER:
        paper.save_frontier(to, cells, known[first], known[MEMORY], size)
    else:
        paper.save_curve(to, cells, known[name], size)
    info(f"{len(cells)} cells are drawn in {to}, {size.width:g} x {size.height:g} inches.")


def _inches(width: str) -> float:
    from kvpolicy.lab.plots.paper import WIDTHS

    try:
        inches = WIDTHS[width] if width in WIDTHS else float(width)
    except ValueError:
        inches = 0.0
    if not 0.5 <= inches <= 50:
        msg = f"--width was given {width!r}; wanted is column, page, or inches such as 3.25."
        raise KVPolicyError(msg)
    return inches


def _choose(views: "Sequence[GroupView]", model: str | None, task: str | None) -> "GroupView":
    """The one comparison that is meant."""
    if not views:
        msg = "no sample is done yet; there is something to draw when the first one is."
        raise ResultsError(msg)
    meant = [
        view
        for view in views
        if model in (None, view.group.model) and task in (None, view.group.task)
    ]
    if len(meant) == 1:
        return meant[0]
    names = [f"--model {v.group.model} --task {v.group.task}" for v in meant or views]
    advice = f"choose from: {'; '.join(dict.fromkeys(names))}."
    if meant and len(set(names)) == 1:
        advice = f"these were asked in {len(meant)} ways: give runs of one way only."
    msg = f"one figure shows one model and one task, and {len(meant)} comparisons fit; {advice}"
    raise ResultsError(msg)


def _of_series(view: "GroupView", names: Sequence[str]) -> "list[CellView]":
    """The cells of some series, in their order; of all if none is named."""
    known = list(dict.fromkeys(cell.series for cell in view.cells))
    missing = [name for name in names if name not in known]
    if missing:
        msg = f"--series was given {missing[0]!r}; here are {', '.join(known)}."
        raise ResultsError(msg)
    return [cell for name in names or known for cell in view.cells if cell.series == name]
