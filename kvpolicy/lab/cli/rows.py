"""The table of a comparison, in words."""

from collections.abc import Mapping, Sequence

from kvpolicy.cli.output import format_bytes, format_table
from kvpolicy.lab.analysis.facets import FacetRow
from kvpolicy.lab.analysis.table import Row
from kvpolicy.lab.statistics import Estimate
from kvpolicy.lab.tasks.measures import ACCURACY, Column

# Heading of a column: what it says of each row.
Labels = Mapping[str, Sequence[str]]

_LEFT = ("policy", "budget")
_RIGHT = ("n", "length", "cut off", "compacted", "KV/sample, most", "tok/s")
_INTERVAL = "95 % CI"


def table(
    rows: Sequence[Row],
    columns_: Sequence[Column] = (ACCURACY,),
    *,
    labels: Labels | None = None,
    width: int | None = None,
) -> str:
    """Lay out a comparison.

    Args:
        rows: Its rows.
        columns_: What the task measures; each stands with its interval.
        labels: What else is said of the rows, in columns before all others.
        width: Characters a line may take; no limit if not given.

    Returns:
        The lines. ``length`` and ``compacted`` (times) are means; ``KV/sample, most`` is of the
        sample that held most; ``tok/s`` is ``-`` for a cell that was interrupted.
    """
    measured = [word for column in columns_ for word in (column.title, _INTERVAL)]
    headers = [*_LEFT, *measured, *_RIGHT]
    words = [_words(row, columns_) for row in rows]
    return _set(headers, words, labels, width)


def facet_table(
    rows: Sequence[FacetRow],
    columns_: Sequence[Column],
    *,
    labels: Labels | None = None,
    width: int | None = None,
) -> str:
    """Lay out a comparison by one facet of the items.

    Args:
        rows: Its rows.
        columns_: What the task measures.
        labels: As for `table`.
        width: Characters a line may take; no limit if not given.
    """
    facet = rows[0].facet if rows else ""
    measured = [word for column in columns_ for word in (column.title, _INTERVAL)]
    headers = [*_LEFT, facet, *measured, "n", "cut off"]
    words = []
    for one in rows:
        all_words = _words(one.row, columns_)
        figures = all_words[2 : 2 + len(measured)]
        words.append([*all_words[:2], str(one.value), *figures, *_counts(one.row)])
    return _set(headers, words, labels, width)


def _set(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    labels: Labels | None,
    width: int | None,
) -> str:
    labels = labels or {}
    headers = [*labels, *headers]
    rows = [[*(said[i] for said in labels.values()), *row] for i, row in enumerate(rows)]
    return format_table(headers, rows, right=range(len(labels) + 1, len(headers)), width=width)


def _words(row: Row, columns_: Sequence[Column]) -> list[str]:
    num, cut_off = _counts(row)
    return [
        row.series,
        "all" if row.budget is None else f"{row.budget:g}",
        *[word for column in columns_ for word in _figures(column, row.measured[column.name])],
        num,
        f"{row.length.value:.0f}" if row.length else "-",
        cut_off,
        f"{row.compactions:.1f}",
        format_bytes(row.peak_bytes),
        "-" if row.throughput_tok_s is None else f"{row.throughput_tok_s:,.0f}",
    ]


def _figures(column: Column, estimate: Estimate | None) -> list[str]:
    if estimate is None:
        return ["-", "-"]
    if column.is_share:
        return [f"{estimate.value:.0%}", f"{100 * estimate.low:.0f}-{100 * estimate.high:.0f}%"]
    return [column.words(estimate.value), f"{estimate.low:.4g}..{estimate.high:.4g}"]


def _counts(row: Row) -> list[str]:
    failed = f" ({row.num_errors} failed)" if row.num_errors else ""
    ungraded = f" ({row.num_ungraded} ungraded)" if row.num_ungraded else ""
    return [f"{row.n}{failed}{ungraded}", f"{row.truncated:.0%}"]
