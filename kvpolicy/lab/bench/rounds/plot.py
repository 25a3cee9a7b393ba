"""Figure of a benchmark: time of a decode step as texts grow."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicy.lab.bench.contenders.contender import LIMIT, MODEL_ALONE
from kvpolicy.lab.bench.contenders.form import COMPILED, PACKED
from kvpolicy.lab.bench.rounds.summary import BenchResult
from kvpolicy.lab.figure import FAINT, LegendContent, Size, legend_entry, line_look, save_figure
from kvpolicy.lab.labels import short_labels
from kvpolicy.lab.looks import looks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# What no contender can pass, and its line style.
_BOUNDS = {
    LIMIT: "--",
    MODEL_ALONE: ":",
    f"{MODEL_ALONE}, {PACKED}": "-.",
    f"{MODEL_ALONE}, {COMPILED}": (0, (6, 1, 1, 1, 1, 1)),
}


def save_bench_plot(found: Sequence[BenchResult], path: Path, *, title: str) -> None:
    """Draw the time of a decode step against the tokens that texts have.

    Args:
        found: The results: of decode steps at several lengths, or of whole texts.
        path: File name with suffix ``.png``, ``.svg`` or ``.pdf``.
        title: Title of the figure.

    Raises:
        OutputError: The file cannot be written.
    """
    of_texts = any(one.curve for one in found)
    curves = {name: _curve([one for one in found if one.name == name]) for name in _names(found)}
    policies = {one.name: one.policy for one in found if one.name not in _BOUNDS}

    def draw(figure: "Figure") -> LegendContent:
        axes = figure.subplots()
        looks = looks_of(policies)
        prefix, labels = short_labels(list(policies))
        entries = []
        for name, label in zip(policies, labels, strict=True):
            tokens, step_ms = zip(*curves[name], strict=True)
            markevery = 8 if of_texts else 1
            axes.plot(tokens, step_ms, markevery=markevery, **line_look(looks[name]))
            entries.append((label, legend_entry(looks[name])))
        for name, style in _BOUNDS.items():
            if name in curves:
                entries.append((name, _draw_bound(axes, curves[name], style)))
        axes.set_xlabel("tokens generated so far" if of_texts else "tokens held")
        axes.set_title("Time of a decode step, ms")
        if of_texts:
            axes.set_ylim(bottom=0)
        else:
            _scale_logarithmically(axes, sorted({one.held or 0 for one in found}))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y")
        figure.suptitle(title, x=0.012, ha="left", fontsize="medium", color=FAINT)
        return LegendContent(entries, prefix)

    save_figure([path], Size(8.4, 4.4, 9.5, dpi=160), draw)


def _scale_logarithmically(axes: "Axes", lengths: Sequence[int]) -> None:
    """Lengths and times differ by factors of up to a hundred."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(lengths)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())


def _draw_bound(axes: "Axes", curve: Sequence[tuple[float, float]], style: Any) -> "Line2D":
    """Draw a line; one that was measured at one place only holds for all."""
    tokens, step_ms = zip(*curve, strict=True)
    if len(curve) == 1:
        return axes.axhline(step_ms[0], color=FAINT, linestyle=style)
    (line,) = axes.plot(tokens, step_ms, color=FAINT, linestyle=style)
    return line


def _names(found: Sequence[BenchResult]) -> list[str]:
    return list(dict.fromkeys(one.name for one in found))


def _curve(results: Sequence[BenchResult]) -> Sequence[tuple[float, float]]:
    """Tokens and milliseconds of a step of one contender."""
    (first, *_) = results
    if first.curve:
        return first.curve
    return [(one.held or 0, one.mean_ms.median) for one in results]
