"""Figures for papers: one quantity, in the size that a page has for it, without a title."""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.errors import OutputError
from kvpolicy.files import atomic_write
from kvpolicy.lab.plots.drawing import INK, STYLE, Line, lines_of, panel, share_axis, top
from kvpolicy.lab.report.gather import CellView
from kvpolicy.lab.report.metrics import Quantity
from kvpolicy.lab.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".pdf", ".png")
_KIB = 1024

# Inches: a column and both columns of most two-column styles.
WIDTHS = {"column": 3.3, "page": 6.9}


@attrs.frozen
class Size:
    """How large a figure is.

    Attributes:
        width: Inches.
        height: Inches.
        font_size: Points.
    """

    width: float = WIDTHS["column"]
    height: float = 2.3
    font_size: float = 8.0


def save_curve(path: Path, cells: Sequence[CellView], quantity: Quantity, size: Size) -> None:
    """Draw a quantity against the budget.

    Args:
        path: The file; its suffix says the format, one of `FORMATS`. The same cells give the
            same bytes.
        cells: The cells.
        quantity: What is drawn.
        size: How large.

    Raises:
        OutputError: It cannot be written, or in no such format.
    """

    def draw(axes: "Axes") -> None:
        unit, name = _unit(quantity, cells)
        panel(
            axes, cells, lambda cell: _over(quantity.estimate(cell), unit), is_share=_is(quantity)
        )
        axes.set_ylabel(name)

    _save(path, size, draw)


def save_frontier(
    path: Path, cells: Sequence[CellView], quality: Quantity, memory: Quantity, size: Size
) -> None:
    """Draw a quantity against memory, with steps that join the cells no other beats.

    Args:
        path: As for `save_curve`.
        cells: The cells.
        quality: What a cell is worth; more is better if it is a share, else less.
        memory: What it takes.
        size: How large.

    Raises:
        OutputError: As for `save_curve`.
    """

    def draw(axes: "Axes") -> None:
        unit, name = _unit(memory, cells)
        points = {
            cell.cell.cell: (taken.value, worth)
            for cell in cells
            if (taken := _over(memory.estimate(cell), unit))
            and (worth := _over(quality.estimate(cell), 1))
        }
        _points(axes, cells, points)
        _steps(axes, [(x, y.value) for x, y in points.values()], 1 if _is(quality) else -1)
        if _is(quality):
            share_axis(axes)
        else:
            axes.set_ylim(0, top(worth for _, worth in points.values()))
        places = [x for x, _ in points.values()]
        if places and max(places) > 6 * min(places) > 0:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(name)
        axes.set_ylabel(quality.heading)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="lower right", handlelength=1.0)

    _save(path, size, draw)


def _points(
    axes: "Axes", cells: Sequence[CellView], points: dict[str, tuple[float, Interval]]
) -> None:
    references = tuple(cell for cell in cells if cell.budget is None)
    names = dict.fromkeys(cell.series for cell in references)
    lines = [
        Line(name, INK, "X", 0.0, tuple(cell for cell in references if cell.series == name))
        for name in names
    ]
    for line in [*lines, *lines_of(cells)]:
        found = [points[cell.cell.cell] for cell in line.cells if cell.cell.cell in points]
        if not found:
            continue
        axes.errorbar(
            [x for x, _ in found],
            [y.value for _, y in found],
            yerr=[
                [max(0.0, y.value - y.low) for _, y in found],
                [max(0.0, y.high - y.value) for _, y in found],
            ],
            label=line.label,
            color=line.colour,
            marker=line.marker,
            markersize=5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            linestyle="none",
            elinewidth=0.9,
            capsize=0,
            zorder=3,
        )


def frontier(points: Sequence[tuple[float, float]], sign: int) -> list[tuple[float, float]]:
    """The points that no other beats in worth with as little memory, from small to large.

    Args:
        points: Memory and worth.
        sign: 1 if more worth is better, -1 if less.
    """
    found: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not found or sign * y > sign * found[-1][1]:
            found.append((x, y))
    return found


def _steps(axes: "Axes", points: Sequence[tuple[float, float]], sign: int) -> None:
    best = frontier(points, sign)
    x, y = [one for one, _ in best], [other for _, other in best]
    axes.step(x, y, where="post", color="#8a8a8a", linewidth=0.9, linestyle=":", zorder=1)


def _is(quantity: Quantity) -> bool:
    return quantity.kind == "share"


def _over(estimate: Interval | float | None, unit: float) -> Interval | None:
    """An estimate in a unit; without an interval where nothing is known of one."""
    if estimate is None:
        return None
    if not isinstance(estimate, Interval):
        estimate = Interval(estimate, estimate, estimate)
    if not all(map(math.isfinite, (estimate.value, estimate.low, estimate.high))):
        return None
    return Interval(estimate.value / unit, estimate.low / unit, estimate.high / unit)


def _unit(quantity: Quantity, cells: Sequence[CellView]) -> tuple[float, str]:
    """In which unit bytes are drawn, and what the axis is called then."""
    if quantity.kind != "bytes":
        return 1.0, quantity.heading
    found = [value.value for cell in cells if (value := _over(quantity.estimate(cell), 1))]
    power = min(int(math.log(max([1.0, *found]), _KIB)), 3)
    name = ("bytes", "KiB", "MiB", "GiB")[power]
    return float(_KIB**power), quantity.heading.replace("bytes", name)


def _save(path: Path, size: Size, draw: Callable[["Axes"], None]) -> None:
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        msg = f"{path} has no format that figures are drawn in; end it in {', '.join(FORMATS)}."
        raise OutputError(msg)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": size.font_size,
        "pdf.fonttype": 42,  # conferences refuse Type 3
    }
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    picture = io.BytesIO()
    with mpl.rc_context(STYLE | style):
        figure = Figure(figsize=(size.width, size.height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(picture, format=suffix[1:], dpi=300, metadata=dates.get(suffix))
    atomic_write(path, picture.getvalue())
