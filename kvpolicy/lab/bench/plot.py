"""Figure of a benchmark: time of a decode step as texts grow."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy.lab.bench.baselines import MODEL_ALONE
from kvpolicy.lab.bench.summary import BenchResult
from kvpolicy.lab.figure import FAINT, LegendContent, Size, legend_entry, line_look, save_figure
from kvpolicy.lab.labels import short_labels
from kvpolicy.lab.looks import looks_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_bench_plot(found: Sequence[BenchResult], path: Path, *, title: str) -> None:
    """Draw the time of a decode step against the tokens generated so far.

    Args:
        found: The results.
        path: File name with suffix ``.png``, ``.svg`` or ``.pdf``.
        title: Title of the figure.

    Raises:
        OutputError: The file cannot be written.
    """
    alone = [one for one in found if one.name == MODEL_ALONE]
    others = [one for one in found if one.name != MODEL_ALONE]

    def draw(figure: "Figure") -> LegendContent:
        axes = figure.subplots()
        looks = looks_of({one.name: one.policy for one in others})
        prefix, labels = short_labels([one.name for one in others])
        entries = []
        for one, label in zip(others, labels, strict=True):
            tokens, step_ms = zip(*one.curve, strict=True)
            axes.plot(tokens, step_ms, markevery=8, **line_look(looks[one.name]))
            entries.append((label, legend_entry(looks[one.name])))
        for one in alone:  # its steps all take the same time
            line = axes.axhline(one.step_ms, color=FAINT, linestyle=":")
            entries.append((one.name, line))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens generated so far")
        axes.set_title("Time of a decode step, ms")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y")
        figure.suptitle(title, x=0.012, ha="left", fontsize="medium", color=FAINT)
        return LegendContent(entries, prefix)

    save_figure([path], Size(8.4, 4.4, 9.5, dpi=160), draw)
