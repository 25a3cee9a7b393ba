"""Comparisons of two cells, in words."""

from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.cli.output import format_table, terminal_width
from kvpolicy.lab.analysis.compare import Contrast, Pair, Side, by_facet, to_json
from kvpolicy.lab.analysis.naming import differing, setting
from kvpolicy.lab.analysis.paired import DRAWS
from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.cli.gaps import describe_gaps
from kvpolicy.lab.statistics import Estimate
from kvpolicy.lab.tasks.measures import Column

_TESTS = {"mcnemar": "McNemar's exact test", "sign": "Exact sign test"}
_MOST = 200  # characters of a text that are shown; --json shows all of them


def how_drawn(seed: int) -> str:
    """How intervals are made.

    Args:
        seed: Of the resampling.
    """
    return f"95 %, BCa bootstrap over items, {DRAWS:,} resamples, seed {seed}"


def plain(found: Sequence[Contrast], by: str | None, *, items: bool, seed: int) -> dict[str, Any]:
    """Comparisons as plain data.

    Args:
        found: The comparisons.
        by: A facet to break them down by, if wanted.
        items: Whether the items on which cells part are wanted.
        seed: Of the resampling.
    """
    comparisons = []
    for one in found:
        record = to_json(one)
        if by is not None:
            parts = by_facet(one, by, seed=seed)
            record["facets"] = [{"facet": by, "value": v, **to_json(part)} for v, part in parts]
        if items:
            record["parted"] = [_plain_item(one, pair) for pair in _parted(one)]
        comparisons.append(record)
    return {"interval": how_drawn(seed), "comparisons": comparisons}


def two_cells(found: Contrast, *, items: bool) -> str:
    """One comparison.

    Args:
        found: The comparison.
        items: Whether to show the items on which the cells part.
    """
    names = differing([found.a.cell, found.b.cell])
    headers = ["", "cell", *names, found.column.title, "95 % CI", *_COUNTS]
    sides = [
        [letter, side.cell.name, *(setting(side.cell, name) for name in names), *_side(found, side)]
        for letter, side in (("A", found.a), ("B", found.b))
    ]
    right = range(2 + len(names), len(headers))
    lines = [
        format_table(headers, sides, right=right, width=terminal_width()),
        "",
        *_verdict(found),
    ]
    if items:
        for pair in _parted(found):
            lines += ["", *_item_lines(found, pair)]
    return "\n".join(lines) + "\n"


def many_cells(found: Sequence[Contrast]) -> str:
    """Several comparisons, each cell less the one that it was compared with.

    Args:
        found: The comparisons.

    Returns:
        The table, and under it a line for each cell with samples that have no plain answer.
        ``unpaired`` counts items that one of the two has a value for and the other has not.
    """
    names = differing([one.a.cell for one in found])
    headers = ["cell", "less", *names, "items", "unpaired", "difference", "95 % CI"]
    headers += ["more", "fewer", "p", "Holm"]
    rows = [
        [
            one.a.cell.name,
            one.b.cell.name,
            *(setting(one.a.cell, name) for name in names),
            f"{len(one.pairs):,}",
            f"{one.num_unpaired:,}",
            *_difference(one),
            f"{one.num_above:,}",
            f"{one.num_below:,}",
            _p(one.p_value),
            _p(one.p_holm),
        ]
        for one in found
    ]
    table = format_table(headers, rows, right=range(2 + len(names), len(headers)))
    gaps = describe_gaps(list(dict.fromkeys(s.cell for one in found for s in (one.a, one.b))))
    return "\n".join([table, *(["", *gaps] if gaps else [])]) + "\n"


def by_facets(found: Sequence[Contrast], facet: str, seed: int) -> str:
    """Comparisons for each value of a facet.

    Args:
        found: The comparisons.
        facet: The facet.
        seed: Of the resampling.
    """
    headers = ["cell", "less", facet, "items", "unpaired", "A", "B", "difference", "95 % CI"]
    headers += ["more", "fewer"]
    rows = [
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
        for value, part in by_facet(one, facet, seed=seed)
    ]
    return "\n" + format_table(headers, rows, right=range(2, len(headers))) + "\n"


_COUNTS = ("samples", "cut off", "failed", "ungraded", "unpaired")


def _side(found: Contrast, side: Side) -> list[str]:
    counts = side.cell.counts()
    return [
        _value(found.column, side.estimate),
        _interval(found.column, side.estimate),
        _of_all(counts["num_samples"], counts["num_expected"]),
        f"{counts['num_truncated']:,}",
        f"{counts['num_errors']:,}",
        f"{counts['num_ungraded']:,}",
        f"{side.num_unpaired:,}",
    ]


def _of_all(done: int, expected: int) -> str:
    return f"{done:,}" if done == expected else f"{done:,} of {expected:,}"


def _verdict(found: Contrast) -> list[str]:
    if found.p_value is None:
        return ["A and B have no item in common."]
    value, interval = _difference(found)
    unit = " points" if found.column.is_share else ""
    items = "1 item" if len(found.pairs) == 1 else f"{len(found.pairs):,} items"
    return [
        f"A less B: {value}{unit}, 95 % CI {interval}, over {items}",
        _counts(found),
        f"{_TESTS[found.test]}: p = {_p(found.p_value)}",
    ]


def _counts(found: Contrast) -> str:
    if found.num_both_right is None:
        return (
            f"A more {found.num_above:,}, B more {found.num_below:,}, the same {found.num_equal:,}"
        )
    return (
        f"both right {found.num_both_right:,}, only A {found.num_above:,}, "
        f"only B {found.num_below:,}, neither {found.num_neither_right:,}"
    )


def _difference(found: Contrast) -> list[str]:
    if found.difference is None:
        return ["-", "-"]
    scale, form = (100, "+.1f") if found.column.is_share else (1, "+.4g")
    value, low, high = (scale * end + 0.0 for end in attrs.astuple(found.difference))
    return [format(value, form), f"{low:{form}}..{high:{form}}"]


def _value(column: Column, estimate: Estimate | None) -> str:
    return "-" if estimate is None else column.words(estimate.value)


def _interval(column: Column, estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if column.is_share:
        return f"{100 * estimate.low:.0f}-{100 * estimate.high:.0f}%"
    return f"{estimate.low:.4g}..{estimate.high:.4g}"


def _p(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _parted(found: Contrast) -> list[Pair]:
    return [pair for pair in found.pairs if pair.difference]


def _item_lines(found: Contrast, pair: Pair) -> list[str]:
    facets = ", ".join(f"{name} {value}" for name, value in pair.facets.items())
    values = f"A {found.column.words(pair.a)}, B {found.column.words(pair.b)}"
    item = found.a.cell.items.get(pair.item) or found.b.cell.items.get(pair.item)
    where = f"item {item.item}, seed {item.seed}" if item else f"item {pair.item}"
    lines = [f"── {where}{f': {facets}' if facets else ''}: {values} ──"]
    if item is not None:
        lines += [f"prompt  {_end(item.prompt)}", f"answer  {_end(item.answer)}"]
    for letter, side in (("A", found.a), ("B", found.b)):
        lines += [f"{letter}       {_end(text)}" for text in _texts(side.cell, pair.item)]
    return lines


def _plain_item(found: Contrast, pair: Pair) -> dict[str, Any]:
    item = found.a.cell.items.get(pair.item) or found.b.cell.items.get(pair.item)
    return {
        "item": item.item if item else None,
        "seed": item.seed if item else None,
        "facets": dict(pair.facets),
        "prompt": item.prompt if item else None,
        "answer": item.answer if item else None,
        "a": pair.a,
        "b": pair.b,
        "a_texts": _texts(found.a.cell, pair.item),
        "b_texts": _texts(found.b.cell, pair.item),
    }


def _texts(cell: PooledCell, item: int) -> list[str]:
    """What a cell said to an item; why it failed, where it did."""
    return [
        sample.text if sample.error is None else f"({sample.error})"
        for sample in cell.samples
        if sample.item == item
    ]


def _end(text: str) -> str:
    """The end of a text, where answers stand, on one line and without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text)
    words = " ".join(line.split())
    return words if len(words) <= _MOST else f"... {words[-_MOST:]}"
