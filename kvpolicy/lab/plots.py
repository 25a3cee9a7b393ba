"""Pictures of a comparison: what the task measures, and length, against the budget."""

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

import attrs

from kvpolicy.lab.measures import ACCURACY, Column
from kvpolicy.lab.stats import Estimate
from kvpolicy.lab.table import Row
from kvpolicy.wholefile import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every kind of colour vision, the pale ones last;
# markers tell the lines apart in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "D", "^", "v", "P")
_INK, _FAINT = "#333333", "#8a8a8a"
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "svg.hashsalt": "kvpolicy",  # the same rows give the same file
}


@attrs.frozen
class _Line:
    """One series, drawn."""

    label: str
    colour: str
    marker: str
    aside: float
    rows: tuple[Row, ...]


def save_plots(
    rows: Sequence[Row],
    folder: Path,
    column: Column = ACCURACY,
    *,
    title: str,
    name: str = "plot",
) -> list[Path]:
    """Draw what the task measures and the mean length against the budget, side by side.

    Args:
        rows: The comparison. Rows without a budget become horizontal lines.
        folder: Where ``plot.png`` and ``plot.svg`` go.
        column: What is drawn on the left.
        title: What was compared, on what.
        name: What the files are called instead.

    Returns:
        The files.

    Raises:
        OutputError: They cannot be written.
    """
    # Imported here: matplotlib takes a second, and most commands draw nothing.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10.5, 4.3), layout="constrained")
        _draw(figure, rows, column, title)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            picture = io.BytesIO()
            figure.savefig(picture, format=path.suffix[1:], dpi=160, metadata=metadata)
            write_whole(path, picture.getvalue())
    return paths


def _draw(figure: "Figure", rows: Sequence[Row], column: Column, title: str) -> None:
    left, right = figure.subplots(1, 2)
    figure.suptitle(title, x=0.012, ha="left", fontsize=9.5, color=_FAINT)
    lines, references = _lines(rows), [row for row in rows if row.budget is None]
    left.set_title(column.heading)
    if column.is_share:
        left.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        left.set_ylim(-0.02, 1.04)
    else:
        left.set_ylim(0, _top(row.measured[column.name] for row in rows))
    _panel(left, lines, references, lambda row: row.measured[column.name])
    right.set_title("Mean length, tokens")
    right.set_ylim(0, _top(row.length for row in rows))
    _panel(right, lines, references, lambda row: row.length)


def _top(values: Iterable[Estimate | None]) -> float:
    """Where an axis ends that begins at 0 and has room for all intervals."""
    return 1.06 * max((value.high for value in values if value), default=0.0) or 1.0


def _lines(rows: Sequence[Row]) -> list[_Line]:
    series: dict[str, list[Row]] = {}
    for row in rows:
        if row.budget is not None:
            series.setdefault(row.series, []).append(row)
    middle = (len(series) - 1) / 2
    return [
        _Line(
            label=label,
            colour=_COLOURS[i % len(_COLOURS)],
            marker=_MARKERS[i % len(_MARKERS)],
            aside=2.5 * (i - middle),
            rows=tuple(sorted(points, key=_budget)),
        )
        for i, (label, points) in enumerate(series.items())
    ]


def _budget(row: Row) -> float:
    return row.budget or 0.0


def _panel(
    axes: "Axes",
    lines: Sequence[_Line],
    references: Sequence[Row],
    measure: Callable[[Row], Estimate | None],
) -> None:
    _budget_axis(axes, sorted({_budget(row) for line in lines for row in line.rows}))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    labels = [label for row in references if (label := _reference(axes, row, measure(row)))]
    labels += [label for line in lines if (label := _line(axes, line, measure))]
    _write_labels(axes, labels)


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


def _reference(axes: "Axes", row: Row, value: Estimate | None) -> _Label | None:
    if value is None:
        return None
    axes.axhline(value.value, color=_INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
    axes.axhspan(value.low, value.high, color=_INK, alpha=0.07, linewidth=0, zorder=0)
    return _Label(row.series, _INK, value.value)


def _line(axes: "Axes", line: _Line, measure: Callable[[Row], Estimate | None]) -> _Label | None:
    points = [(_budget(row), value) for row in line.rows if (value := measure(row))]
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
    bottom, top = axes.get_ylim()
    labels = sorted(labels, key=lambda label: label.height)
    places = _apart([label.height for label in labels], 0.062 * (top - bottom))
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


def _apart(heights: Sequence[float], gap: float) -> list[float]:
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
