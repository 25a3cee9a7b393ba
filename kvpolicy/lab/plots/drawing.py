"""Drawing with matplotlib: lines against the budget, with intervals and their names beside them."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import attrs

from kvpolicy.lab.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every kind of colour vision, the pale ones last;
# markers tell the lines apart in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "D", "^", "v", "P")
INK, FAINT = "#333333", "#8a8a8a"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "svg.hashsalt": "kvpolicy",  # the same rows give the same file
}


class Drawn(Protocol):
    """What a picture has to know of a cell."""

    @property
    def series(self) -> str:
        """Which line it is a point of."""

    @property
    def budget(self) -> float | None:
        """Where on the line; ``None`` for a cell that is a line of its own across the picture."""


Cell = TypeVar("Cell", bound=Drawn)


@attrs.frozen
class Line(Generic[Cell]):
    """One series, drawn."""

    label: str
    colour: str
    marker: str
    aside: float
    cells: tuple[Cell, ...]


def panel(
    axes: "Axes",
    cells: Sequence[Cell],
    measure: Callable[[Cell], Interval | None],
    *,
    is_share: bool = False,
) -> None:
    """Draw one quantity against the budget.

    Args:
        axes: Where; in a figure whose size is settled.
        cells: The cells. Those without a budget become horizontal lines.
        measure: The quantity of a cell; ``None`` where it has none.
        is_share: Whether it lies between 0 and 1 and is written in percent.
    """
    share_axis(axes) if is_share else axes.set_ylim(0, top(map(measure, cells)))
    lines = lines_of(cells)
    _budget_axis(axes, sorted({_budget(cell) for line in lines for cell in line.cells}))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    references = [cell for cell in cells if cell.budget is None]
    labels = [label for cell in references if (label := _reference(axes, cell, measure(cell)))]
    labels += [label for line in lines if (label := _line(axes, line, measure))]
    _write_labels(axes, labels)


def share_axis(axes: "Axes") -> None:
    """Let the upright axis be one of shares, with a little room at both ends."""
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylim(-0.02, 1.04)


def top(values: Iterable[Interval | None]) -> float:
    """Where an axis ends that begins at 0 and has room for all intervals."""
    return 1.06 * max((value.high for value in values if value), default=0.0) or 1.0


def lines_of(cells: Sequence[Cell]) -> list[Line[Cell]]:
    """The series that have budgets, with the looks that they have in every picture."""
    series: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.budget is not None:
            series.setdefault(cell.series, []).append(cell)
    middle = (len(series) - 1) / 2
    return [
        Line(
            label=label,
            colour=_COLOURS[i % len(_COLOURS)],
            marker=_MARKERS[i % len(_MARKERS)],
            aside=2.5 * (i - middle),
            cells=tuple(sorted(points, key=_budget)),
        )
        for i, (label, points) in enumerate(series.items())
    ]


def _budget(cell: Drawn) -> float:
    return cell.budget or 0.0


def _budget_axis(axes: "Axes", budgets: Sequence[float]) -> None:
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


@attrs.frozen
class _Label:
    """A name to be written beside the end of a line."""

    text: str
    colour: str
    height: float


def _reference(axes: "Axes", cell: Drawn, value: Interval | None) -> _Label | None:
    if value is None:
        return None
    axes.axhline(value.value, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
    axes.axhspan(value.low, value.high, color=INK, alpha=0.07, linewidth=0, zorder=0)
    return _Label(cell.series, INK, value.value)


def _line(
    axes: "Axes", line: Line[Cell], measure: Callable[[Cell], Interval | None]
) -> _Label | None:
    points = [(_budget(cell), value) for cell in line.cells if (value := measure(cell))]
    if not points:
        return None
    from matplotlib.transforms import offset_copy

    figure = cast("Figure", axes.figure)
    axes.errorbar(
        [budget for budget, _ in points],
        [value.value for _, value in points],
        yerr=[
            [max(0.0, value.value - value.low) for _, value in points],
            [max(0.0, value.high - value.value) for _, value in points],
        ],
        # A few points aside, so that the intervals of one budget do not hide each other.
        transform=offset_copy(axes.transData, figure, x=line.aside, units="points"),
        color=line.colour,
        marker=line.marker,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        linewidth=1.8,
        elinewidth=1.0,
        capsize=0,
        zorder=3,
    )
    return _Label(line.label, line.colour, points[-1][1].value)


def _write_labels(axes: "Axes", labels: Sequence[_Label]) -> None:
    """Write each name beside the end of its line, moved apart where they would overlap."""
    bottom, high = axes.get_ylim()
    labels = sorted(labels, key=lambda label: label.height)
    places = apart([label.height for label in labels], _line_height(axes) * (high - bottom))
    for label, place in zip(labels, places, strict=True):
        axes.annotate(
            label.text,
            xy=(1.01, label.height),
            xycoords=("axes fraction", "data"),
            xytext=(1.06, place),
            textcoords=("axes fraction", "data"),
            color=label.colour,
            va="center",
            fontweight="bold",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 0,
            },
        )


def _line_height(axes: "Axes") -> float:
    """The height of a line of text as a part of that of the axes, about."""
    import matplotlib as mpl

    axes_height = 0.72 * 72 * cast("Figure", axes.figure).get_figheight()  # points
    return 1.45 * mpl.rcParams["font.size"] / axes_height


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move rising heights as little as possible, so that neighbours are ``gap`` apart.

    The squared moves are least when heights that would touch form a block around their mean
    (pool adjacent violators).
    """
    blocks: list[list[float]] = []  # of each block its members, less what the gaps take
    for i, height in enumerate(heights):
        blocks.append([height - i * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) >= fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    centres = [fmean(block) for block in blocks for _ in block]
    return [centre + i * gap for i, centre in enumerate(centres)]
