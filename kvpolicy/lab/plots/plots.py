"""Pictures of a comparison: what the task measures, and length, against the budget."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy.files import atomic_write
from kvpolicy.lab.analysis.table import Row
from kvpolicy.lab.plots.drawing import FAINT, STYLE, panel
from kvpolicy.lab.tasks.task import ACCURACY, Column

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 4.3), layout="constrained")
        _draw(figure, rows, column, title)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            picture = io.BytesIO()
            figure.savefig(picture, format=path.suffix[1:], dpi=160, metadata=metadata)
            atomic_write(path, picture.getvalue())
    return paths


def _draw(figure: "Figure", rows: Sequence[Row], column: Column, title: str) -> None:
    left, right = figure.subplots(1, 2)
    figure.suptitle(title, x=0.012, ha="left", fontsize=9.5, color=FAINT)
    left.set_title(column.heading)
    panel(left, rows, lambda row: row.measured[column.name], is_share=column.is_share)
    right.set_title("Mean length, tokens")
    panel(right, rows, lambda row: row.length)
