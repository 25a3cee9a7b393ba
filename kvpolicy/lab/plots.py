"""Plots of results: a quantity against the budget, the bytes of a sequence, or memory."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.lab.analysis.pooling import PooledCell, is_by_bytes
from kvpolicy.lab.analysis.table import Row
from kvpolicy.lab.figure import FAINT, LegendContent, Size, legend_entry, line_look, save_figure
from kvpolicy.lab.labels import short_labels
from kvpolicy.lab.looks import Look, looks_of, policy_of
from kvpolicy.lab.statistics import Interval
from kvpolicy.lab.tasks.task import ACCURACY, Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LARGEST = 1e300  # axes of larger numbers overflow
_MOST_RATIO = 1e12  # on a logarithmic axis
_MOST_TICKS = 16


@attrs.frozen
class Point:
    """One cell in a plot.

    Attributes:
        series: The line it belongs to.
        x: Its budget, or bytes per sequence in the unit of the axis; ``None`` for a reference,
            which becomes a horizontal line.
        value: The plotted quantity; a point without a finite one is left out.
        memory: Bytes or another cost, for `save_frontier`.
        policy: The policy that gives the series its colour, see `kvpolicy.lab.looks.policy_of`.
    """

    series: str
    x: float | None
    value: Interval | None
    memory: float | None = None
    policy: str = ""


@attrs.frozen
class Axis:
    """What a quantity is plotted against.

    Attributes:
        label: Its label, with the unit.
        xs: The place of each cell.
    """

    label: str
    xs: tuple[float | None, ...]


def axis_of(cells: Sequence[PooledCell]) -> Axis:
    """Bytes per sequence where cells were run for bytes, else budgets.

    Args:
        cells: The cells of a figure.
    """
    if not is_by_bytes(cells):
        return Axis("budget, rows kept per layer and KV head", tuple(cell.budget for cell in cells))
    sizes = [cell.record.bytes_per_sequence or 0 for cell in cells]
    unit, name = unit_of_bytes(max(sizes))
    return Axis(f"KV bytes of a sequence, {name}", tuple(size / unit for size in sizes))


def unit_of_bytes(largest: float) -> tuple[float, str]:
    """The unit in which numbers of bytes are plotted.

    Args:
        largest: The largest of them.

    Returns:
        Its bytes, and its name.
    """
    power = min(int(math.log(max(largest, 1.0), 1024)), 3)
    return 1024.0**power, ("bytes", "KiB", "MiB", "GiB")[power]


def save_sweep_plots(
    rows: Sequence[Row],
    folder: Path,
    columns: Sequence[Column] = (ACCURACY,),
    *,
    title: str,
    name: str = "plot",
) -> list[Path]:
    """Plot what was measured and the mean length side by side, see `axis_of`.

    Where the task and not the plan decides how long an answer is, as for perplexity, all lengths
    are the same, and the second quantity of the task is drawn in their place.

    Args:
        rows: Rows of a result table; those without a budget become horizontal lines where the axis
            is the budget.
        folder: Where ``plot.png`` and ``plot.svg`` go.
        columns: What the task measures; the first is drawn.
        title: Title of the figure.
        name: Name of the files without suffix.

    Returns:
        The files.

    Raises:
        OutputError: They cannot be written.
    """
    cells = [row.cell for row in rows]
    axis = axis_of(cells)

    def points(values: Iterable[Interval | None]) -> list[Point]:
        return [
            Point(cell.series, x, value, policy=policy_of(cell.record.resolved))
            for cell, x, value in zip(cells, axis.xs, values, strict=True)
        ]

    first, *others = columns
    measured = points(row.measured[first.name] for row in rows)
    if others and len(rows) > 1 and len({row.length and row.length.value for row in rows}) == 1:
        heading, is_share = others[0].heading, others[0].is_share
        beside = points(row.measured[others[0].name] for row in rows)
    else:
        heading, is_share = "Mean length, tokens", False
        beside = points(row.length for row in rows)

    def draw(figure: "Figure") -> LegendContent:
        left, right = figure.subplots(1, 2)
        figure.suptitle(title, x=0.012, ha="left", fontsize="medium", color=FAINT)
        left.set_title(first.heading)
        _draw_lines(left, measured, axis.label, is_share=first.is_share)
        right.set_title(heading)
        _draw_lines(right, beside, axis.label, is_share=is_share)
        return _legend([*measured, *beside])

    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    save_figure(paths, Size(10.5, 4.6, 9.5, dpi=160), draw)
    return paths


def save_curve(
    path: Path,
    points: Sequence[Point],
    labels: tuple[str, str],
    *,
    is_share: bool,
    size: Size,
) -> None:
    """Plot a quantity against the budget, or against the bytes of a sequence.

    Args:
        path: The file; its suffix is one of `FORMATS`. The same points give the same bytes.
        points: The points; those without a place on the axis become horizontal lines.
        labels: Axis labels: of `Axis`, and of the quantity.
        is_share: Whether the quantity lies between 0 and 1.
        size: Size of the figure.

    Raises:
        OutputError: The file cannot be written, has another suffix, or is too small.
    """

    def draw(figure: "Figure") -> LegendContent:
        axes = figure.subplots()
        axes.set_ylabel(labels[1])
        _draw_lines(axes, points, labels[0], is_share=is_share)
        return _legend(points)

    save_figure([path], size, draw)


def save_frontier(
    path: Path,
    points: Sequence[Point],
    labels: tuple[str, str],
    *,
    is_share: bool,
    more_is_better: bool,
    size: Size,
) -> None:
    """Plot a quantity against memory, with a dotted line through the best points.

    Args:
        path: As in `save_curve`.
        points: The points; those without a value or memory are left out.
        labels: Axis labels of memory and of the quantity.
        is_share: Whether the quantity lies between 0 and 1.
        more_is_better: Whether a larger quantity is a better one.
        size: Size of the figure.

    Raises:
        OutputError: As in `save_curve`.
    """

    def draw(figure: "Figure") -> LegendContent:
        axes = figure.subplots()
        found = [
            (point, point.memory, value)
            for point, value in _drawable(points)
            if point.memory is not None and abs(point.memory) <= _LARGEST
        ]
        for series, look in _looks(points).items():
            mine = sorted((x, y) for point, x, y in found if point.series == series)
            _draw_points(axes, mine, **line_look(look) | {"linewidth": 0.7})
        sign = 1 if more_is_better else -1
        best = frontier([(x, y.value) for _, x, y in found], sign)
        stairs: dict[str, Any] = {"color": FAINT, "linewidth": 1.2, "linestyle": ":", "zorder": 1}
        axes.step([x for x, _ in best], [y for _, y in best], where="post", **stairs)
        _set_value_axis(axes, [y for _, _, y in found], is_share=is_share)
        costs = [x for _, x, _ in found]
        if costs and _MOST_RATIO * min(costs) > max(costs) > 6 * min(costs) > 0:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.grid()
        return _legend([point for point, _, _ in found], with_markers=True)

    save_figure([path], size, draw)


def frontier(points: Sequence[tuple[float, float]], sign: int) -> list[tuple[float, float]]:
    """The points that are better than all with as little memory, by rising memory.

    Args:
        points: Memory and quality.
        sign: 1 if more quality is better, -1 if less.
    """
    found: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not found or sign * y > sign * found[-1][1]:
            found.append((x, y))
    return found


def _looks(points: Sequence[Point]) -> dict[str, Look]:
    return looks_of({point.series: point.policy for point in points})


def _legend(points: Sequence[Point], *, with_markers: bool = False) -> LegendContent:
    """A legend of the series that have a value; a horizontal line has no marker."""
    looks = _looks(points)
    shown = {point.series for point, _ in _drawable(points)}
    lines = {point.series for point in points if point.x is not None}
    title, short = short_labels([series for series in looks if series in lines])
    labels = dict(zip((series for series in looks if series in lines), short, strict=True))
    entries = []
    for series, look in looks.items():
        if series in shown:
            plain = {} if with_markers or series in lines else {"marker": ""}
            entries.append((labels.get(series, series), legend_entry(look, **plain)))
    return LegendContent(entries, title)


def _drawable(points: Iterable[Point]) -> list[tuple[Point, Interval]]:
    """Points with a finite value, and its interval; an infinite interval has no width."""
    found = []
    for point in points:
        if point.value is None or not abs(point.value.value) <= _LARGEST:
            continue
        value, low, high = attrs.astuple(point.value)
        is_finite = abs(low) <= _LARGEST and abs(high) <= _LARGEST
        found.append((point, Interval(value, low, high) if is_finite else Interval(*[value] * 3)))
    return found


def _draw_lines(
    axes: "Axes", points: Sequence[Point], label: str, *, is_share: bool = False
) -> None:
    from matplotlib.transforms import ScaledTranslation

    looks, drawn = _looks(points), _drawable(points)
    lines: dict[str, list[tuple[float, Interval]]] = {}
    for point, value in drawn:
        look = line_look(looks[point.series])
        if point.x is None:
            style = {key: look[key] for key in ("color", "linestyle")}
            axes.axhline(value.value, linewidth=1.2, zorder=1, **style)
            axes.axhspan(value.low, value.high, color=look["color"], alpha=0.07, lw=0, zorder=0)
        else:
            lines.setdefault(point.series, []).append((point.x, value))
    for i, (series, line) in enumerate(lines.items()):
        # Some points to the side, so that intervals at the same place do not cover each other.
        offset = min(2.5, 10 / len(lines)) * (i - (len(lines) - 1) / 2)
        scale = axes.figure.dpi_scale_trans
        shifted = axes.transData + ScaledTranslation(offset / 72, 0, scale)
        look = line_look(looks[series]) | {"linewidth": 1.6}
        _draw_points(axes, sorted(line), transform=shifted, **look)
    _set_axis(axes, sorted({point.x for point in points if point.x is not None}), label)
    _set_value_axis(axes, [value for _, value in drawn], is_share=is_share)
    axes.grid(axis="y")


def _draw_points(axes: "Axes", points: Sequence[tuple[float, Interval]], **look: Any) -> None:
    if not points:
        return
    axes.errorbar(
        [x for x, _ in points],
        [y.value for _, y in points],
        yerr=[
            [max(0.0, y.value - y.low) for _, y in points],
            [max(0.0, y.high - y.value) for _, y in points],
        ],
        elinewidth=1.0,
        zorder=3,
        **look,
    )


def _set_axis(axes: "Axes", xs: Sequence[float], label: str) -> None:
    axes.set_xlabel(label)
    low, high = (xs[0], xs[-1]) if xs else (0.0, 1.0)
    if low > 0 and 6 * low < high < _MOST_RATIO * low:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.12, high * 1.12)
    else:
        margin = 0.06 * (high - low) or 0.5
        axes.set_xlim(low - margin, high + margin)
    shown = _apart(xs, is_log=axes.get_xscale() == "log")
    axes.set_xticks(shown, [f"{x:.10g}" if x == int(x) else f"{x:.3g}" for x in shown])
    axes.minorticks_off()


def _apart(xs: Sequence[float], *, is_log: bool) -> list[float]:
    """Places of an axis without those that are too close to the one before for two labels."""
    if len(xs) < 2:
        return list(xs)
    scaled = [math.log(x) if is_log else x for x in xs]
    least = (scaled[-1] - scaled[0]) / _MOST_TICKS
    shown, last = [xs[0]], scaled[0]
    for x, place in zip(xs[1:], scaled[1:], strict=True):
        if place - last >= least:
            shown.append(x)
            last = place
    return shown


def _set_value_axis(axes: "Axes", values: Sequence[Interval], *, is_share: bool) -> None:
    if is_share:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_ylim(-0.02, 1.04)
        return
    low = min(0.0, *(value.low for value in values), *(value.value for value in values), 0.0)
    high = max(0.0, *(value.high for value in values), *(value.value for value in values), 0.0)
    margin = 0.06 * (high - low)
    axes.set_ylim(low - (margin if low < 0 else 0), (high + margin) if high > low else low + 1)
