"""Figure of a benchmark: time of a decode step as texts grow."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicy.files import atomic_write
from kvpolicy.lab.bench.baselines import GENERATE, MODEL_ALONE
from kvpolicy.lab.bench.summary import BenchResult

# Okabe and Ito's colours, which are distinct for all kinds of colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7a5c00")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)))
_INK, _FAINT = "#333333", "#8a8a8a"
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "svg.hashsalt": "kvpolicy",  # equal results give equal files
}


def save_bench_plot(found: Sequence[BenchResult], path: Path, *, title: str) -> None:
    """Draw the time of a decode step against the tokens generated so far.

    Args:
        found: The results.
        path: File name with suffix ``.png``, ``.svg`` or ``.pdf``.
        title: Title of the figure.

    Raises:
        OutputError: The file cannot be written.
    """
    # Imported here: matplotlib takes a second, and most commands draw nothing.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 4.4), layout="constrained")
        axes = figure.subplots()
        num_drawn = 0
        for one in found:
            x, y = zip(*one.curve, strict=True)
            if one.name == MODEL_ALONE:  # its steps all take the same time
                axes.axhline(
                    one.step_ms, color=_FAINT, linewidth=1.2, linestyle=":", label=MODEL_ALONE
                )
                continue
            colour = _INK if one.name == GENERATE else _COLOURS[num_drawn % len(_COLOURS)]
            dash = _DASHES[num_drawn // len(_COLOURS) % len(_DASHES)]
            num_drawn += one.name != GENERATE
            axes.plot(x, y, color=colour, linestyle=dash, linewidth=1.8, label=one.name)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens generated so far")
        axes.set_title("Time of a decode step, ms", loc="left", fontsize=11, fontweight="bold")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle(title, x=0.012, ha="left", fontsize=9.5, color=_FAINT)
        picture = io.BytesIO()
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(picture, format=path.suffix[1:], dpi=160, metadata=metadata)
    atomic_write(path, picture.getvalue())
