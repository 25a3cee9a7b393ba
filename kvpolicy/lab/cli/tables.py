"""Result tables as text, and messages about incomplete cells."""

from collections.abc import Mapping, Sequence

from kvpolicy.cli.output import format_bytes, format_table, info
from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.analysis.select import format_budget, unique_labels
from kvpolicy.lab.analysis.table import Row
from kvpolicy.lab.statistics import Interval
from kvpolicy.lab.tasks.task import ACCURACY, Column

# Heading of a column: its text for each row.
Labels = Mapping[str, Sequence[str]]

_PROBLEMS = {"num_truncated": "truncated", "num_errors": "failed", "num_ungraded": "ungraded"}


def table(
    rows: Sequence[Row],
    measured: Sequence[Column] = (ACCURACY,),
    *,
    labels: Labels | None = None,
    width: int | None = None,
) -> str:
    """Lay out rows of cells.

    Args:
        rows: The rows.
        measured: What the task measures; each column is followed by its interval.
        labels: Additional columns before all others.
        width: Characters of a line; unlimited if not given.

    Returns:
        The lines. ``length`` and ``compacted`` (times) are means, ``KV/sample, most`` is the
        largest peak of a sample, and ``tok/s`` is ``-`` for a cell that was interrupted.
    """
    headers = ["policy", "budget", *_measured_headers(measured)]
    headers += ["n", "length", "truncated", "compacted", "KV/sample, most", "tok/s"]
    lines = [
        [
            row.cell.series,
            format_budget(row.cell.budget),
            *_measured(row, measured),
            _count(row),
            f"{row.length.value:.0f}" if row.length else "-",
            f"{row.truncated:.0%}",
            f"{row.compactions:.1f}",
            format_bytes(row.peak_bytes),
            "-" if row.throughput_tok_s is None else f"{row.throughput_tok_s:,.0f}",
        ]
        for row in rows
    ]
    return _lay_out(headers, lines, labels, width)


def facet_table(
    rows: Sequence[Row],
    measured: Sequence[Column],
    *,
    labels: Labels | None = None,
    width: int | None = None,
) -> str:
    """Lay out rows of cells broken down by one facet.

    Args:
        rows: The rows.
        measured: What the task measures.
        labels: Additional columns before all others.
        width: Characters of a line; unlimited if not given.
    """
    facet = (rows[0].facet or "") if rows else ""
    headers = ["policy", "budget", facet, *_measured_headers(measured), "n", "truncated"]
    lines = [
        [
            row.cell.series,
            format_budget(row.cell.budget),
            str(row.facet_value),
            *_measured(row, measured),
            _count(row),
            f"{row.truncated:.0%}",
        ]
        for row in rows
    ]
    return _lay_out(headers, lines, labels, width)


def format_interval(column: Column, interval: Interval | None) -> str:
    """The ends of an interval, in percent for a share."""
    if interval is None:
        return "-"
    if column.is_share:
        return f"{100 * interval.low:.0f}-{100 * interval.high:.0f}%"
    return f"{interval.low:.4g}..{interval.high:.4g}"


def warn_incomplete(cells: Sequence[PooledCell]) -> None:
    """Tell the user which cells are not complete.

    Args:
        cells: The cells.
    """
    for cell, label in zip(cells, unique_labels(cells), strict=True):
        if len(cell.samples) < cell.num_expected:
            done = f"{len(cell.samples):,} of {cell.num_expected:,} samples"
            info(f"{label} is not complete: {done} are done.")


def list_problems(cells: Sequence[PooledCell]) -> list[str]:
    """A line for each cell with truncated, failed or ungraded samples.

    Args:
        cells: The cells.
    """
    lines = []
    for cell, label in zip(cells, unique_labels(cells), strict=True):
        counts = cell.counts()
        problems = [f"{counts[key]:,} {name}" for key, name in _PROBLEMS.items() if counts[key]]
        if problems:
            lines.append(f"{label}: of {counts['num_samples']:,} samples {', '.join(problems)}")
    return lines


def _measured_headers(measured: Sequence[Column]) -> list[str]:
    return [header for column in measured for header in (column.title, "95 % CI")]


def _measured(row: Row, measured: Sequence[Column]) -> list[str]:
    texts = []
    for column in measured:
        interval = row.measured[column.name]
        texts.append("-" if interval is None else column.format(interval.value))
        texts.append(format_interval(column, interval))
    return texts


def _count(row: Row) -> str:
    failed = f" ({row.num_errors} failed)" if row.num_errors else ""
    ungraded = f" ({row.num_ungraded} ungraded)" if row.num_ungraded else ""
    return f"{row.n}{failed}{ungraded}"


def _lay_out(
    headers: Sequence[str],
    lines: Sequence[Sequence[str]],
    labels: Labels | None,
    width: int | None,
) -> str:
    labels = labels or {}
    labelled = [[*(texts[i] for texts in labels.values()), *line] for i, line in enumerate(lines)]
    headers = [*labels, *headers]
    return format_table(headers, labelled, right=range(len(labels) + 1, len(headers)), width=width)
