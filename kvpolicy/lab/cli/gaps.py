"""What stored cells lack, in words: samples that are not done, or have no plain answer."""

from collections.abc import Sequence

from kvpolicy.cli.output import info
from kvpolicy.lab.analysis.naming import told_apart
from kvpolicy.lab.analysis.pooling import PooledCell

_GAPS = {"num_truncated": "cut off", "num_errors": "failed", "num_ungraded": "ungraded"}


def say_what_lacks(cells: Sequence[PooledCell]) -> None:
    """Tell the user which cells are not complete.

    Args:
        cells: The cells.
    """
    for cell, name in zip(cells, told_apart(cells), strict=True):
        if len(cell.samples) < cell.num_expected:
            done = f"{len(cell.samples):,} of {cell.num_expected:,} samples"
            info(f"{name} is not complete: {done} are done.")


def describe_gaps(cells: Sequence[PooledCell]) -> list[str]:
    """A line for each cell that has samples which were cut off, failed or could not be graded.

    Args:
        cells: The cells.
    """
    lines = []
    for cell, name in zip(cells, told_apart(cells), strict=True):
        counts = cell.counts()
        gaps = [f"{counts[key]:,} {word}" for key, word in _GAPS.items() if counts[key]]
        if gaps:
            lines.append(f"{name}: of {counts['num_samples']:,} samples {', '.join(gaps)}")
    return lines
