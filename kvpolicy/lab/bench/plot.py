"""Figure of a benchmark: time of a decode step as texts grow."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicy.lab.bench.baselines import GENERATE, MODEL_ALONE
from kvpolicy.lab.bench.summary import BenchResult
from kvpolicy.lab.plots import FAINT, INK, Size, look, save_figure

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

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        num_drawn = 0
        for one in found:
            if one.name == MODEL_ALONE:  # its steps all take the same time
                axes.axhline(one.step_ms, color=FAINT, linestyle=":", label=MODEL_ALONE)
                continue
            style: dict[str, Any] = {"color": INK} if one.name == GENERATE else look(num_drawn)
            num_drawn += one.name != GENERATE
            tokens, step_ms = zip(*one.curve, strict=True)
            axes.plot(tokens, step_ms, markevery=8, markersize=5, label=one.name, **style)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens generated so far")
        axes.set_title("Time of a decode step, ms")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y")
        figure.suptitle(title, x=0.012, ha="left", fontsize="medium", color=FAINT)

    save_figure([path], Size(8.4, 4.4, 9.5, dpi=160), draw)
