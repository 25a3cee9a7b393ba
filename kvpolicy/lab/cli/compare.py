"""``kvpolicy results compare``: two cells item by item, or every cell with a baseline.

With ``--json``: ``{"interval": ..., "comparisons": [...]}``; docs/reference/results.md lists the
fields of a comparison.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.options import Json
from kvpolicy.cli.output import format_table, info, print_json, print_text, terminal_width
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.cli.results_options import Budgets, Models, Seeds, SeriesNames, Tasks

if TYPE_CHECKING:
    from kvpolicy.lab.analysis.compare import CellComparison, ComparedCell, Pair
    from kvpolicy.lab.analysis.pooling import PooledCell
    from kvpolicy.lab.statistics import Interval
    from kvpolicy.lab.tasks.task import Column

_TESTS = {"mcnemar": "McNemar's exact test", "sign": "Exact sign test"}
_MAX_TEXT = 200  # characters of a text that are shown; --json has the whole text


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... A B", help="Runs, then two cells: SERIES@BUDGET, or digits of an id."
        ),
    ],
    with_: Annotated[
        str | None,
        typer.Option("--with", metavar="CELL", help="Compare every cell with this baseline."),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Quantity to compare, or length. [default: the first column]"
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="FACET", help="Break down by a facet, such as depth.")
    ] = None,
    items: Annotated[
        bool, typer.Option("--items", help="Show the items on which A and B differ.")
    ] = False,
    bootstrap_seed: Annotated[int, typer.Option(min=0, help="Random seed of the bootstrap.")] = 0,
    series: SeriesNames = None,
    budget: Budgets = None,
    model: Models = None,
    task: Tasks = None,
    seed: Seeds = None,
    json: Json = False,
) -> None:
    """Compare cells item by item: paired difference, its interval, and an exact test.

    A minus B, on the items of both. With --with, every other cell minus that baseline, with
    Holm's correction for the number of comparisons.
    """
    from kvpolicy.lab.analysis.compare import adjust_p_values
    from kvpolicy.lab.analysis.pooling import pool
    from kvpolicy.lab.analysis.select import (
        check_facet,
        find_cell,
        open_runs,
        pairs_with,
        select,
    )
    from kvpolicy.lab.cli.tables import warn_incomplete

    run_names, cell_names = (names, []) if with_ is not None else (names[:-2], names[-2:])
    if not run_names:
        msg = "compare was given no run; write RUN A B, or RUN --with CELL."
        raise KVPolicyError(msg)
    if items and with_ is not None:
        msg = "--items and --with were given; items are shown for two cells: RUN A B."
        raise KVPolicyError(msg)
    runs = open_runs(run_names)
    selection = select(runs, series=series, budgets=budget, models=model, tasks=task, seeds=seed)
    # --series and --budget select what --with is compared with, not A and B or the baseline.
    cells = pool(runs, selection.for_any_plan().keeps)
    check_facet(cells, by)
    if with_ is None:
        pairs = [(find_cell(cells, cell_names[0]), find_cell(cells, cell_names[1]))]
    else:
        pairs = [(a, b) for a, b in pairs_with(cells, with_) if selection.keeps(a.group, a.record)]
    found = [_compare(a, b, column, bootstrap_seed) for a, b in pairs]
    if with_ is not None:
        found = adjust_p_values(found)
    method = _interval_method(found, bootstrap_seed)
    if json:
        records = [_to_json(one, by, items=items, seed=bootstrap_seed) for one in found]
        print_json({"interval": method, "comparisons": records}, indent=2)
    else:
        warn_incomplete(list(dict.fromkeys(cell for pair in pairs for cell in pair)))
        text = _two_cells(found[0], items=items) if with_ is None else _many_cells(found)
        print_text(text + (_facets(found, by, bootstrap_seed) if by is not None else ""))
        info(f"intervals: {method}.")


def _compare(a: "PooledCell", b: "PooledCell", name: str | None, seed: int) -> "CellComparison":
    from kvpolicy.lab.analysis.compare import compare_cells
    from kvpolicy.lab.analysis.pooling import column_of

    column = column_of(b.group, name)
    column_of(a.group, column.name)  # raises if the first cell has no such column
    return compare_cells(a, b, column, seed=seed)


def _interval_method(found: "Sequence[CellComparison]", seed: int) -> str:
    from kvpolicy.lab.analysis.compare import MCNEMAR
    from kvpolicy.lab.statistics import RESAMPLES

    bootstrap = f"BCa bootstrap over items, {RESAMPLES:,} resamples, seed {seed}"
    names = {one.test: "Newcombe's for paired proportions" for one in found if one.test == MCNEMAR}
    names |= {one.test: bootstrap for one in found if one.test != MCNEMAR}
    return f"95 %, {' or '.join(names.values()) or bootstrap}"


def _to_json(found: "CellComparison", by: str | None, *, items: bool, seed: int) -> dict[str, Any]:
    from kvpolicy.lab.analysis.compare import compare_by_facet

    record = found.to_json()
    if by is not None:
        parts = compare_by_facet(found, by, seed=seed)
        record["facets"] = [{"facet": by, "value": v, **part.to_json()} for v, part in parts]
    if items:
        record["parted"] = [_item_to_json(found, pair) for pair in _differing(found)]
    return record


def _two_cells(found: "CellComparison", *, items: bool) -> str:
    from kvpolicy.lab.analysis.select import differing_settings, format_setting

    names = differing_settings([found.a.cell, found.b.cell])
    headers = ["", "cell", *names, found.column.title, "95 % CI"]
    headers += ["samples", "truncated", "failed", "ungraded", "unpaired"]
    lines = [
        [
            letter,
            side.cell.name,
            *(format_setting(side.cell, name) for name in names),
            *_figures(found.column, side),
        ]
        for letter, side in (("A", found.a), ("B", found.b))
    ]
    right = range(2 + len(names), len(headers))
    texts = [
        format_table(headers, lines, right=right, width=terminal_width()),
        "",
        *_summary(found),
    ]
    if items:
        for pair in _differing(found):
            texts += ["", *_item_lines(found, pair)]
    return "\n".join(texts) + "\n"


def _many_cells(found: "Sequence[CellComparison]") -> str:
    """A line for each comparison, and one for each cell with samples to read with care."""
    from kvpolicy.lab.analysis.select import differing_settings, format_setting
    from kvpolicy.lab.cli.tables import list_problems

    names = differing_settings([one.a.cell for one in found])
    headers = ["cell", "baseline", *names, "items", "unpaired", "difference", "95 % CI"]
    headers += ["more", "fewer", "p", "Holm"]
    lines = [
        [
            one.a.cell.name,
            one.b.cell.name,
            *(format_setting(one.a.cell, name) for name in names),
            f"{len(one.pairs):,}",
            f"{one.num_unpaired:,}",
            *_difference(one),
            f"{one.num_above:,}",
            f"{one.num_below:,}",
            _p_value(one.p_value),
            _p_value(one.p_holm),
        ]
        for one in found
    ]
    text = format_table(headers, lines, right=range(2 + len(names), len(headers)))
    cells = dict.fromkeys(side.cell for one in found for side in (one.a, one.b))
    problems = list_problems(list(cells))
    return "\n".join([text, *(["", *problems] if problems else [])]) + "\n"


def _facets(found: "Sequence[CellComparison]", facet: str, seed: int) -> str:
    from kvpolicy.lab.analysis.compare import compare_by_facet

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
    return "\n" + format_table(headers, lines, right=range(2, len(headers))) + "\n"


def _figures(column: "Column", side: "ComparedCell") -> list[str]:
    from kvpolicy.lab.cli.tables import format_interval

    counts = side.cell.counts()
    done, expected = counts["num_samples"], counts["num_expected"]
    return [
        _value(column, side.estimate),
        format_interval(column, side.estimate),
        f"{done:,}" if done == expected else f"{done:,} of {expected:,}",
        f"{counts['num_truncated']:,}",
        f"{counts['num_errors']:,}",
        f"{counts['num_ungraded']:,}",
        f"{side.num_unpaired:,}",
    ]


def _summary(found: "CellComparison") -> list[str]:
    if found.p_value is None:
        return ["A and B have no item in common."]
    value, interval = _difference(found)
    unit = " points" if found.column.is_share else ""
    items = "1 item" if len(found.pairs) == 1 else f"{len(found.pairs):,} items"
    if found.num_both_right is None:
        counts = (
            f"A more {found.num_above:,}, B more {found.num_below:,}, equal {found.num_equal:,}"
        )
    else:
        counts = (
            f"both correct {found.num_both_right:,}, only A {found.num_above:,}, "
            f"only B {found.num_below:,}, neither {found.num_neither_right:,}"
        )
    return [
        f"A - B: {value}{unit}, 95 % CI {interval}, over {items}",
        counts,
        f"{_TESTS[found.test]}: p = {_p_value(found.p_value)}",
    ]


def _difference(found: "CellComparison") -> list[str]:
    if found.difference is None:
        return ["-", "-"]
    scale, form = (100, "+.1f") if found.column.is_share else (1, "+.4g")
    value, low, high = (scale * end + 0.0 for end in attrs.astuple(found.difference))
    return [format(value, form), f"{low:{form}}..{high:{form}}"]


def _value(column: "Column", estimate: "Interval | None") -> str:
    return "-" if estimate is None else column.format(estimate.value)


def _p_value(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _differing(found: "CellComparison") -> "list[Pair]":
    return [pair for pair in found.pairs if pair.difference]


def _item_lines(found: "CellComparison", pair: "Pair") -> list[str]:
    facets = ", ".join(f"{name} {value}" for name, value in pair.facets.items())
    values = f"A {found.column.format(pair.a)}, B {found.column.format(pair.b)}"
    item = found.a.cell.items.get(pair.item) or found.b.cell.items.get(pair.item)
    where = f"item {item.item}, seed {item.seed}" if item else f"item {pair.item}"
    lines = [f"── {where}{f': {facets}' if facets else ''}: {values} ──"]
    if item is not None:
        lines += [f"prompt  {_shorten(item.prompt)}", f"answer  {_shorten(item.answer)}"]
    for letter, side in (("A", found.a), ("B", found.b)):
        lines += [f"{letter}       {_shorten(text)}" for text in _texts(side.cell, pair.item)]
    return lines


def _item_to_json(found: "CellComparison", pair: "Pair") -> dict[str, Any]:
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


def _texts(cell: "PooledCell", item: int) -> list[str]:
    """What a cell generated for an item, or the error of a failed sample."""
    return [
        sample.text if sample.error is None else f"({sample.error})"
        for sample in cell.samples
        if sample.item == item
    ]


def _shorten(text: str) -> str:
    """The end of a text, where answers are, on one line and without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _MAX_TEXT else f"... {line[-_MAX_TEXT:]}"
