"""Results as text: tables of cells, comparisons, and messages about incomplete cells."""

from collections.abc import Mapping, Sequence

import attrs

from kvpolicy.cli.latex import format_latex
from kvpolicy.cli.output import info
from kvpolicy.cli.text_table import format_table
from kvpolicy.lab.analysis.compare import (
    MCNEMAR,
    CellComparison,
    Pair,
    compare_by_facet,
    compare_compacted,
)
from kvpolicy.lab.analysis.pooling import PooledCell, is_by_bytes
from kvpolicy.lab.analysis.select import (
    differing_settings,
    format_budget,
    format_setting,
    unique_labels,
)
from kvpolicy.lab.analysis.table import Row
from kvpolicy.lab.statistics import Interval
from kvpolicy.lab.tasks.task import ACCURACY, Column
from kvpolicy.quantities import format_bytes, format_count
from kvpolicy.text import visible

_PROBLEMS = {"num_truncated": "truncated", "num_errors": "failed", "num_ungraded": "ungraded"}
_MAX_TEXT = 200  # characters of a generated text that are shown; --json has the whole text


def table(
    rows: Sequence[Row],
    measured: Sequence[Column] = (ACCURACY,),
    *,
    labels: Mapping[str, Sequence[str]] | None = None,
    width: int | None = None,
    latex: bool = False,
) -> str:
    """Lay out rows of cells, all of them whole or all broken down by the same facet.

    Args:
        rows: The rows.
        measured: What the task measures; each column is followed by its interval.
        labels: Additional columns before all others: the heading, and the text of each row.
        width: Characters of a line; unlimited if not given.
        latex: Whether it is for a paper, in LaTeX.

    Returns:
        The lines. ``bytes/seq`` is what a sequence allocates, where some were run for a number of
        bytes; ``compacted (n)`` is the first quantity over the samples whose cache was
        compacted, and their number; ``length`` is a mean; ``max KV/sample`` is the largest peak
        of a sample; ``tok/s`` is ``-`` for a cell that was interrupted.
    """
    labels = labels or {}
    facet = rows[0].facet if rows else None
    names = [*labels, "policy", "budget", *([] if facet is None else [facet])]
    by_bytes = is_by_bytes(row.cell for row in rows)
    columns = {
        **({"bytes/seq": [_bytes(row.cell) for row in rows]} if by_bytes else {}),
        **{f"{one.title}, 95 % CI": _estimates(rows, one) for one in measured},
        "compacted (n)": [_compacted(measured[0], r.compacted, r.num_compacted) for r in rows],
        "n": [_num_samples(row) for row in rows],
        "truncated": [f"{row.truncated:.0%}" for row in rows],
    }
    if facet is None:
        columns |= {
            "length": [f"{row.length.value:.0f}" if row.length else "-" for row in rows],
            "max KV/sample": [format_bytes(row.peak_bytes) for row in rows],
            "tok/s": [_throughput(row) for row in rows],
        }
    texts = [*labels.values(), *zip(*map(_names, rows), strict=True), *columns.values()]
    lines = list(zip(*texts, strict=True))
    headers = [*names, *columns]
    right = range(len(labels) + 1, len(headers))
    if latex:
        return format_latex(headers, lines, right=right)
    return format_table(headers, lines, right=right, keys=len(names), width=width)


def tables_of_runs(rows: Sequence[Row], width: int | None, *, latex: bool = False) -> str:
    """One table for each set of measured columns, with the settings in which cells differ."""
    by_columns: dict[object, list[Row]] = {}
    for row in rows:
        by_columns.setdefault(tuple(column.name for column in row.columns), []).append(row)
    names = differing_settings([row.cell for row in rows])
    texts = []
    for some in by_columns.values():
        labels = {name: [format_setting(row.cell, name) for row in some] for name in names}
        found = table(some, some[0].columns, labels=labels, width=width, latex=latex)
        texts.append(found + "\n")
    return "\n".join(texts)


def two_cells(found: CellComparison, *, items: bool, width: int | None, seed: int = 0) -> str:
    """A comparison of cells A and B.

    Args:
        found: The comparison.
        items: Show the items on which the cells differ.
        width: Characters of a line of the table; unlimited if not given.
        seed: Random seed of the bootstrap.
    """
    names = differing_settings([found.a.cell, found.b.cell])
    headers = ["", "cell", *names, found.column.title, "95 % CI"]
    headers += ["samples", "truncated", "failed", "ungraded", "unpaired"]
    lines = []
    for letter, side in (("A", found.a), ("B", found.b)):
        counts = side.cell.counts()
        lines.append(
            [
                letter,
                side.cell.name,
                *(format_setting(side.cell, name) for name in names),
                _value(found.column, side.estimate),
                _interval(found.column, side.estimate),
                format_progress(counts["num_samples"], counts["num_expected"]),
                *(f"{counts[key]:,}" for key in _PROBLEMS),
                f"{side.num_unpaired:,}",
            ]
        )
    right = range(2 + len(names), len(headers))
    texts = [format_table(headers, lines, right=right, width=width), "", *_summary(found)]
    texts += _of_compacted(compare_compacted(found, seed=seed))
    if items:
        for pair in found.differing:
            texts += ["", *map(visible, _item_lines(found, pair))]
    return "\n".join(texts) + "\n"


def many_cells(found: Sequence[CellComparison], *, width: int | None) -> str:
    """A line for each comparison, and one for each cell with samples to read with care.

    Args:
        found: The comparisons.
        width: Characters of a line of the table; unlimited if not given.
    """
    names = differing_settings([one.a.cell for one in found])
    sides = {
        "bytes/seq": [one.a.cell for one in found],
        "baseline's": [one.b.cell for one in found],
    }
    is_shown = is_by_bytes(cell for cells in sides.values() for cell in cells)
    sizes = {name: list(map(_bytes, cells)) for name, cells in sides.items() if is_shown}
    headers = ["cell", "baseline", *names, *sizes]
    headers += ["items", "unpaired", "compacted", "difference"]
    headers += ["95 % CI", "more", "fewer", "p", "Holm"]
    lines = [
        [
            one.a.cell.name,
            one.b.cell.name,
            *(format_setting(one.a.cell, name) for name in names),
            *(texts[number] for texts in sizes.values()),
            f"{len(one.pairs):,}",
            f"{one.num_unpaired:,}",
            f"{one.num_compacted:,}",
            *_difference(one),
            f"{one.num_above:,}",
            f"{one.num_below:,}",
            _p_value(one.p_value),
            _p_value(one.p_holm),
        ]
        for number, one in enumerate(found)
    ]
    text = format_table(headers, lines, right=range(2 + len(names), len(headers)), width=width)
    cells = dict.fromkeys(side.cell for one in found for side in (one.a, one.b))
    problems = _problems(list(cells))
    return "\n".join([text, *(["", *problems] if problems else [])]) + "\n"


def comparisons_by_facet(
    found: Sequence[CellComparison], facet: str, *, seed: int, width: int | None
) -> str:
    """A line for each comparison and value of a facet.

    Args:
        found: The comparisons.
        facet: Name of the facet.
        seed: Random seed of the bootstrap.
        width: Characters of a line of the table; unlimited if not given.
    """
    headers = ["cell", "baseline", facet, "items", "unpaired", "A", "B", "difference", "95 % CI"]
    headers += ["more", "fewer"]
    lines = [
        [
            part.a.cell.name,
            part.b.cell.name,
            str(value),
            f"{len(part.pairs):,}",
            f"{part.num_unpaired:,}",
            _value(part.column, part.a.estimate),
            _value(part.column, part.b.estimate),
            *_difference(part),
            f"{part.num_above:,}",
            f"{part.num_below:,}",
        ]
        for one in found
        for value, part in compare_by_facet(one, facet, seed=seed)
    ]
    right = range(2, len(headers))
    return "\n" + format_table(headers, lines, right=right, keys=3, width=width) + "\n"


def warn_incomplete(cells: Sequence[PooledCell]) -> None:
    """Tell the user which cells are not complete.

    Args:
        cells: The cells.
    """
    for cell, label in zip(cells, unique_labels(cells), strict=True):
        if len(cell.samples) < cell.num_expected:
            done = format_progress(len(cell.samples), cell.num_expected)
            info(f"{label} is not complete: {done} samples are done.")


def format_progress(num_done: int, num_expected: int) -> str:
    """A number of samples, with how many are expected if some are missing."""
    is_complete = num_done == num_expected
    return f"{num_done:,}" if is_complete else f"{num_done:,} of {num_expected:,}"


def _bytes(cell: PooledCell) -> str:
    return format_bytes(cell.record.bytes_per_sequence or 0)


def _names(row: Row) -> list[str]:
    facet = [] if row.facet is None else [str(row.facet_value)]
    return [row.cell.series, format_budget(row.cell.budget), *facet]


def _estimates(rows: Sequence[Row], column: Column) -> list[str]:
    """Values, and behind them their intervals, aligned left."""
    found = [row.measured[column.name] for row in rows]
    intervals = ["" if one is None else _interval(column, one) for one in found]
    longest = max(map(len, intervals), default=0)
    return [
        f"{_value(column, one)} {interval:<{longest}}"
        for one, interval in zip(found, intervals, strict=True)
    ]


def _compacted(column: Column, estimate: Interval | None, number: int) -> str:
    return f"{_value(column, estimate)} ({number:,})" if number else "-"


def _num_samples(row: Row) -> str:
    failed = f" ({row.num_errors} failed)" if row.num_errors else ""
    ungraded = f" ({row.num_ungraded} ungraded)" if row.num_ungraded else ""
    return f"{row.n}{failed}{ungraded}"


def _throughput(row: Row) -> str:
    return "-" if row.throughput_tok_s is None else f"{row.throughput_tok_s:,.0f}"


def _summary(found: CellComparison) -> list[str]:
    if found.p_value is None:
        return ["A and B have no item in common."]
    value, interval = _difference(found)
    unit = " points" if found.column.is_share else ""
    items = format_count(len(found.pairs), "item")
    if found.test == MCNEMAR:
        test = "McNemar's exact test"
        both = "both correct" if found.column is ACCURACY else "both"
        counts = (
            f"{both} {found.num_both_right:,}, only A {found.num_above:,}, "
            f"only B {found.num_below:,}, neither {found.num_neither_right:,}"
        )
    else:
        test = "Exact sign test"
        counts = (
            f"A more {found.num_above:,}, B more {found.num_below:,}, equal {found.num_equal:,}"
        )
    return [
        f"A - B: {value}{unit}, 95 % CI {interval}, over {items}",
        counts,
        f"{test}: p = {_p_value(found.p_value)}",
    ]


def _of_compacted(found: CellComparison) -> list[str]:
    """The same over the items whose cache was compacted: eviction changes no others."""
    items = format_count(len(found.pairs), "item")
    if not found.pairs:
        return [f"{items} with a compacted cache"]
    value, interval = _difference(found)
    unit = " points" if found.column.is_share else ""
    a, b = (_value(found.column, side.estimate) for side in (found.a, found.b))
    return [
        f"{items} with a compacted cache: A {a}, B {b}, A - B: {value}{unit}, 95 % CI {interval}"
    ]


def _problems(cells: Sequence[PooledCell]) -> list[str]:
    """A line for each cell with truncated, failed or ungraded samples."""
    lines = []
    for cell, label in zip(cells, unique_labels(cells), strict=True):
        counts = cell.counts()
        problems = [f"{counts[key]:,} {name}" for key, name in _PROBLEMS.items() if counts[key]]
        if problems:
            samples = format_count(counts["num_samples"], "sample")
            lines.append(f"{visible(label)}: of {samples} {', '.join(problems)}")
    return lines


def _item_lines(found: CellComparison, pair: Pair) -> list[str]:
    facets = ", ".join(f"{name} {value}" for name, value in pair.facets.items())
    values = f"A {found.column.format(pair.a)}, B {found.column.format(pair.b)}"
    item = found.item(pair)
    heading = f"item {item.item}, seed {item.seed}" if item else f"item {pair.item}"
    lines = [f"── {heading}{f': {facets}' if facets else ''}: {values} ──"]
    if item is not None:
        lines += [f"prompt  {_shorten(item.prompt)}", f"answer  {_shorten(item.answer)}"]
    for letter, side in (("A", found.a), ("B", found.b)):
        lines += [f"{letter}       {_shorten(text)}" for text in side.texts(pair.item)]
    return lines


def _shorten(text: str) -> str:
    """The end of a text, where answers are, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT else f"... {line[-_MAX_TEXT:]}"


def _value(column: Column, estimate: Interval | None) -> str:
    return "-" if estimate is None else column.format(estimate.value)


def _interval(column: Column, interval: Interval | None) -> str:
    """The ends of an interval, in percent for a share."""
    if interval is None:
        return "-"
    if column.is_share:
        return f"{100 * interval.low:.0f}-{100 * interval.high:.0f}%"
    return f"{interval.low:.4g}..{interval.high:.4g}"


def _difference(found: CellComparison) -> list[str]:
    """A difference and its interval, in points for a share."""
    if found.difference is None:
        return ["-", "-"]
    scale, form = (100, "+.1f") if found.column.is_share else (1, "+.4g")
    value, low, high = (scale * end + 0.0 for end in attrs.astuple(found.difference))
    return [format(value, form), f"{low:{form}}..{high:{form}}"]


def _p_value(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
