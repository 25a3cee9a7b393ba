"""``kvpolicy plot``: one quantity of runs as a figure for a paper."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import attrs
import typer

from kvpolicy.cli.options import examples
from kvpolicy.cli.output import info
from kvpolicy.errors import KVPolicyError, ResultsError
from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.analysis.select import open_runs, select
from kvpolicy.lab.cli.results import Budgets, Runs
from kvpolicy.lab.figure import LIMITS_INCHES, LIMITS_POINTS, WIDTHS, Size
from kvpolicy.lab.looks import policy_of
from kvpolicy.lab.plots import Axis, Point, axis_of, save_curve, save_frontier, unit_of_bytes
from kvpolicy.lab.report.gather import GroupView, pooled
from kvpolicy.lab.report.metrics import MEMORY, Quantity, quantities
from kvpolicy.lab.statistics import Interval
from kvpolicy.quantities import format_count

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
        typer.Option(metavar="FILE", help="A .svg, .pdf or .png; an existing file is replaced."),
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
    budget: Budgets = None,
    width: Annotated[
        str,
        typer.Option(metavar="column|page|INCHES", help="3.3 or 6.9 inches, or a number."),
    ] = "column",
    height: Annotated[
        float | None,
        typer.Option(
            metavar="INCHES",
            help="A large legend adds to it. [default: 0.7 of the width, 2.6 at most]",
        ),
    ] = None,
    font_size: Annotated[float, typer.Option(metavar="POINTS")] = 8.0,
) -> None:
    """Draw one quantity against the budget, or the frontier of quality and memory, for a paper.

    Cells that were run for bytes are drawn against the bytes of a sequence.
    The figure has no title, since captions have one. Seeds are pooled. The same runs give the
    same file.
    """
    size = _size(width, height, font_size)
    opened = open_runs(runs, warn=info)
    view = _choose(pooled(opened, select(opened, budgets=budget)), model, task)
    known = {one.name: one for one in quantities(view.group)}
    first = next(iter(known))
    name = quantity or first
    if name not in (*known, FRONTIER):
        msg = f"--quantity was given {name!r}; expected {', '.join([*known, FRONTIER])}."
        raise KVPolicyError(msg)
    cells = _of_series(view, series or [])
    drawn = known[first if name == FRONTIER else name]
    is_share = drawn.kind == "share"
    axis = axis_of(cells)
    points, label = _points(drawn, cells, axis)
    costs, cost_label = _points(known[MEMORY], cells, axis)
    points = [
        attrs.evolve(point, memory=cost.value.value if cost.value else None)
        for point, cost in zip(points, costs, strict=True)
    ]
    num_shown = sum(_is_shown(point, name) for point in points)
    if not num_shown:
        msg = f"no cell has a value of {name!r}, because their runs were interrupted for example."
        raise ResultsError(msg)
    if name == FRONTIER:
        labels, is_better = (cost_label, label), drawn.more_is_better
        save_frontier(to, points, labels, is_share=is_share, more_is_better=is_better, size=size)
    else:
        save_curve(to, points, (axis.label, label), is_share=is_share, size=size)
    info(f"{to} shows {format_count(num_shown, 'cell')}, {size.width:g} inches wide.")


def _is_shown(point: Point, quantity: str) -> bool:
    return point.value is not None and (quantity != FRONTIER or point.memory is not None)


def _points(quantity: Quantity, cells: Sequence[PooledCell], axis: Axis) -> tuple[list[Point], str]:
    """Points of a quantity, in a unit that suits them, and the axis label with this unit."""
    values = [_finite(quantity.estimate(cell)) for cell in cells]
    unit, label = 1.0, quantity.heading
    if quantity.kind == "bytes":
        unit, name = unit_of_bytes(max([1.0, *(value.value for value in values if value)]))
        label = label.replace("bytes", name)
    points = []
    for cell, x, value in zip(cells, axis.xs, values, strict=True):
        if value is not None:
            value = attrs.evolve(
                value, value=value.value / unit, low=value.low / unit, high=value.high / unit
            )
        policy = policy_of(cell.record.resolved)
        points.append(Point(cell.series, x, value, policy=policy))
    return points, label


def _finite(estimate: Interval | float | None) -> Interval | None:
    """An estimate as an interval, without width if none is known; ``None`` if it is infinite."""
    if estimate is None:
        return None
    if not isinstance(estimate, Interval):
        estimate = Interval(estimate, estimate, estimate)
    return estimate if math.isfinite(estimate.value) else None


def _size(width: str, height: float | None, font_size: float) -> Size:
    try:
        inches = WIDTHS[width] if width in WIDTHS else float(width)
    except ValueError:
        inches = math.nan
    low, high = LIMITS_INCHES
    if not low <= inches <= high:
        msg = (
            f"--width was given {width!r}; expected column, page, or {low:g} to {high:g} inches, "
            "such as 3.25."
        )
        raise KVPolicyError(msg)
    if height is not None and not low <= height <= high:
        msg = f"--height was given {height:g}; expected {low:g} to {high:g} inches, such as 2.5."
        raise KVPolicyError(msg)
    low, high = LIMITS_POINTS
    if not low <= font_size <= high:
        msg = f"--font-size was given {font_size:g}; expected {low:g} to {high:g} points."
        raise KVPolicyError(msg)
    return Size(inches, height or min(0.7 * inches, 2.6), font_size)


def _choose(views: Sequence[GroupView], model: str | None, task: str | None) -> GroupView:
    """The one model and task that the figure shows."""
    if not views:
        msg = "the runs have no finished sample yet."
        raise ResultsError(msg)
    found = [
        view
        for view in views
        if model in (None, view.group.model) and task in (None, view.group.task)
    ]
    if len(found) == 1:
        return found[0]
    names = [f"--model {v.group.model} --task {v.group.task}" for v in found or views]
    advice = f"choose from: {'; '.join(dict.fromkeys(names))}."
    if found and len(set(names)) == 1:
        advice = f"these have {len(found)} different settings: give runs of one setting only."
    msg = f"a figure shows one model and one task, but {len(found)} fit; {advice}"
    raise ResultsError(msg)


def _of_series(view: GroupView, names: Sequence[str]) -> list[PooledCell]:
    """The cells of the named series in this order; all cells if none is named."""
    known = list(dict.fromkeys(cell.series for cell in view.cells))
    missing = [name for name in names if not any(cell.is_of(name) for cell in view.cells)]
    if missing:
        msg = f"--series was given {missing[0]!r}; expected {', '.join(known)}."
        raise ResultsError(msg)
    return [cell for name in names or known for cell in view.cells if cell.is_of(name)]
