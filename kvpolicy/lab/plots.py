"""Figures with matplotlib in one style: results against the budget, or against memory."""

import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.errors import OutputError
from kvpolicy.files import atomic_write
from kvpolicy.lab.analysis.table import Row
from kvpolicy.lab.statistics import Interval
from kvpolicy.lab.tasks.task import ACCURACY, Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".pdf", ".png")
WIDTHS = {"column": 3.3, "page": 6.9}  # inches, of most two-column paper styles

# Okabe and Ito's colours, distinct with every kind of colour vision, then three more. The numbers
# of colours and markers have no common divisor, so that 72 series look different.
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#999933", "#8C564B"),
)
_MARKERS = ("o", "s", "D", "^", "v", "P", "*", "<")
INK, FAINT = "#333333", "#8a8a8a"
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": "large",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # conferences refuse Type 3 fonts
    "svg.hashsalt": "kvpolicy",  # the same points give the same file
}
_MAX_LEGEND_SHARE = 0.25  # of the height; a figure with a larger legend grows


@attrs.frozen
class Point:
    """One cell in a plot.

    Attributes:
        series: The line it belongs to.
        budget: Its budget; ``None`` for a reference without eviction.
        value: The plotted quantity; a point without one is left out.
        memory: Bytes or another cost, for `save_frontier`.
    """

    series: str
    budget: float | None
    value: Interval | None
    memory: float | None = None


@attrs.frozen
class Size:
    """Size of a figure.

    Attributes:
        width: Inches.
        height: Inches; the figure is higher if its legend is large.
        font_size: Points.
        dpi: Pixels per inch of a PNG.
    """

    width: float = WIDTHS["column"]
    height: float = 2.3
    font_size: float = 8.0
    dpi: int = 300


def save_sweep_plots(
    rows: Sequence[Row],
    folder: Path,
    column: Column = ACCURACY,
    *,
    title: str,
    name: str = "plot",
) -> list[Path]:
    """Plot a measured quantity and the mean length against the budget, side by side.

    Args:
        rows: Rows of a result table; those without a budget become horizontal lines.
        folder: Where ``plot.png`` and ``plot.svg`` go.
        column: The quantity.
        title: Title of the figure.
        name: Name of the files without suffix.

    Returns:
        The files.

    Raises:
        OutputError: They cannot be written.
    """
    measured = [Point(row.cell.series, row.cell.budget, row.measured[column.name]) for row in rows]
    lengths = [Point(row.cell.series, row.cell.budget, row.length) for row in rows]

    def draw(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2)
        figure.suptitle(title, x=0.012, ha="left", fontsize="medium", color=FAINT)
        left.set_title(column.heading)
        _draw_against_budget(left, measured, is_share=column.is_share)
        right.set_title("Mean length, tokens")
        _draw_against_budget(right, lengths)

    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    save_figure(paths, Size(10.5, 4.6, 9.5, dpi=160), draw)
    return paths


def save_curve(
    path: Path, points: Sequence[Point], label: str, *, is_share: bool, size: Size
) -> None:
    """Plot a quantity against the budget.

    Args:
        path: The file; its suffix is one of `FORMATS`. The same points give the same bytes.
        points: The points; those without a budget become horizontal lines.
        label: Axis label of the quantity.
        is_share: Whether the quantity lies between 0 and 1.
        size: Size of the figure.

    Raises:
        OutputError: The file cannot be written, or has another suffix.
    """

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        _draw_against_budget(axes, points, is_share=is_share)
        axes.set_ylabel(label)

    save_figure([path], size, draw)


def save_frontier(
    path: Path,
    points: Sequence[Point],
    labels: tuple[str, str],
    *,
    is_share: bool,
    size: Size,
) -> None:
    """Plot a quantity against memory, with a dotted line through the best points.

    Args:
        path: As in `save_curve`.
        points: The points; those without a value or memory are left out.
        labels: Axis labels of memory and of the quantity.
        is_share: Whether the quantity lies between 0 and 1, and more is better; otherwise less is
            better.
        size: Size of the figure.

    Raises:
        OutputError: As in `save_curve`.
    """

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        found = [
            (point, point.memory, point.value)
            for point in points
            if point.memory is not None and point.value is not None
        ]
        for series, look in looks_of([point for point, _, _ in found]).items():
            mine = [(x, y) for point, x, y in found if point.series == series]
            _draw_points(axes, mine, label=series, linestyle="none", **look)
        best = frontier([(x, y.value) for _, x, y in found], sign=1 if is_share else -1)
        axes.step(
            [x for x, _ in best],
            [y for _, y in best],
            where="post",
            color=FAINT,
            linewidth=0.9,
            linestyle=":",
            zorder=1,
        )
        _set_value_axis(axes, [y for _, _, y in found], is_share=is_share)
        costs = [x for _, x, _ in found]
        if costs and max(costs) > 6 * min(costs) > 0:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.grid()

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


def _draw_against_budget(axes: "Axes", points: Sequence[Point], *, is_share: bool = False) -> None:
    from matplotlib.transforms import ScaledTranslation

    drawn = [(point, point.value) for point in points if point.value is not None]
    lines = {
        series: sorted(
            (point.budget, value)
            for point, value in drawn
            if point.series == series and point.budget is not None
        )
        for series in dict.fromkeys(p.series for p in points if p.budget is not None)
    }
    looks = looks_of(points)
    for i, (series, line) in enumerate(lines.items()):
        # Some points to the side, so that intervals at the same budget do not cover each other.
        offset = min(2.5, 10 / len(lines)) * (i - (len(lines) - 1) / 2)
        scale = axes.figure.dpi_scale_trans
        shifted = axes.transData + ScaledTranslation(offset / 72, 0, scale)
        _draw_points(axes, line, label=series, transform=shifted, linewidth=1.8, **looks[series])
    for point, value in drawn:
        if point.budget is None:
            axes.axhline(
                value.value,
                label=point.series,
                color=INK,
                linewidth=1.2,
                linestyle=(0, (5, 3)),
                zorder=1,
            )
            axes.axhspan(value.low, value.high, color=INK, alpha=0.07, linewidth=0, zorder=0)
    _set_budget_axis(axes, sorted({p.budget for p in points if p.budget is not None}))
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
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        elinewidth=1.0,
        zorder=3,
        **look,
    )


def looks_of(points: Sequence[Point]) -> dict[str, dict[str, str]]:
    """Colour and marker of each series; a reference without eviction is black."""
    with_budget = dict.fromkeys(point.series for point in points if point.budget is not None)
    looks = {point.series: {"color": INK, "marker": "X"} for point in points}
    return looks | {series: look(i) for i, series in enumerate(with_budget)}


def look(number: int) -> dict[str, str]:
    """Colour and marker of a series; those of the first 72 numbers differ."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
    }


def _set_budget_axis(axes: "Axes", budgets: Sequence[float]) -> None:
    axes.set_xlabel("budget, rows kept per layer and KV head")
    low, high = (budgets[0], budgets[-1]) if budgets else (0.0, 1.0)
    if low > 0 and high > 6 * low:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.12, high * 1.12)
    else:
        margin = 0.06 * (high - low) or 0.5
        axes.set_xlim(low - margin, high + margin)
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()


def _set_value_axis(axes: "Axes", values: Sequence[Interval], *, is_share: bool) -> None:
    if is_share:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_ylim(-0.02, 1.04)
    else:
        axes.set_ylim(0, 1.06 * max((value.high for value in values), default=0.0) or 1.0)


def save_figure(paths: Sequence[Path], size: Size, draw: "Callable[[Figure], None]") -> None:
    """Draw a figure and write it to files, with one legend for all of its axes.

    Args:
        paths: The files; the suffix of each is one of `FORMATS`.
        size: Size of the figure.
        draw: Draws the axes.

    Raises:
        OutputError: A file cannot be written, or has another suffix.
    """
    for path in paths:
        if path.suffix.lower() not in FORMATS:
            msg = f"{path} cannot be drawn in this format; end it in {', '.join(FORMATS)}."
            raise OutputError(msg)
    # Imported here: matplotlib takes a second, and most commands draw nothing.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Without dates, the same points give the same bytes.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with mpl.rc_context(_STYLE | {"font.size": size.font_size}):
        figure = Figure(figsize=(size.width, size.height), layout="constrained")
        draw(figure)
        _add_legend(figure, size)
        for path in paths:
            suffix = path.suffix.lower()
            image = io.BytesIO()
            figure.savefig(image, format=suffix[1:], dpi=size.dpi, metadata=metadata.get(suffix))
            atomic_write(path, image.getvalue())


def _add_legend(figure: "Figure", size: Size) -> None:
    """Add one legend for all axes below them, in as many columns as fit."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    characters = max(int(size.width * 72 / (0.55 * size.font_size)) - 8, 10)
    labels = [textwrap.fill(label, characters) for label in handles]
    for num_columns in range(min(len(labels), 5), 0, -1):
        legend = figure.legend(
            list(handles.values()), labels, loc="outside lower center", ncols=num_columns
        )
        box = legend.get_window_extent()
        if box.width <= 0.98 * figure.bbox.width or num_columns == 1:
            break
        legend.remove()
    height = box.height / figure.dpi
    if height > _MAX_LEGEND_SHARE * size.height:
        figure.set_figheight((1 - _MAX_LEGEND_SHARE) * size.height + height)
