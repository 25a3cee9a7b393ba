"""Result tables: one row for each cell, or for each cell and value of a facet."""

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.lab.analysis.compare import facet_order, paired_difference
from kvpolicy.lab.analysis.pooling import PooledCell, blocks_of, columns_of
from kvpolicy.lab.statistics import Interval
from kvpolicy.lab.store.records import CellTiming, Sample
from kvpolicy.lab.tasks.task import ACCURACY, LENGTH, Column

# First characters of what a spreadsheet takes for a formula, or skips before one.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


@attrs.frozen
class Row:
    """The results of one cell, or of its samples with one value of a facet.

    Attributes:
        cell: The cell.
        columns: What its task measures.
        facet: Facet that the samples have in common; ``None`` for the whole cell.
        facet_value: Its value; empty for the whole cell.
        n: Samples, including failed ones.
        num_items: Items of these samples; fewer if each has several attempts.
        num_correct: Correct samples; ``None`` where nothing is graded.
        num_errors: Failed samples; they count as wrong.
        num_ungraded: Samples without a verdict of the grader; they count as wrong.
        measured: What the task measures, by name of the column, such as ``accuracy``; ``None``
            where no sample has a value.
        compacted: The first of these over the samples whose cache was compacted, which are all
            that eviction can have changed; ``None`` where there is none.
        num_compacted: Number of these samples.
        difference: The first of these minus that of the first cell, see `paired_difference`;
            ``None`` for the first cell, and without an item in common.
        length: Mean number of generated tokens, over items, of samples that did not fail.
        truncated: Share of samples truncated at the generation limit.
        compactions: Mean number of compactions of a sample.
        peak_bytes: Largest peak of KV bytes of a sample.
        peak_kv_bytes: Peak KV bytes of the whole batch; ``None`` without a timing.
        throughput_tok_s: Generated tokens per second; ``None`` without a timing.
        policy_share: Share of the decode time spent on policies; ``None`` without a timing.
    """

    cell: PooledCell = attrs.field(repr=False)
    columns: Sequence[Column] = attrs.field(repr=False)
    facet: str | None
    facet_value: int | str
    n: int
    num_items: int
    num_correct: int | None
    num_errors: int
    num_ungraded: int
    measured: dict[str, Interval | None]
    compacted: Interval | None
    num_compacted: int
    difference: Interval | None
    length: Interval | None
    truncated: float
    compactions: float
    peak_bytes: int
    peak_kv_bytes: int | None
    throughput_tok_s: float | None
    policy_share: float | None


def tabulate(cells: Sequence[PooledCell], columns: Sequence[Column] = (ACCURACY,)) -> list[Row]:
    """Summarise cells of one model and task.

    Args:
        cells: The cells; `Row.difference` is from the first one.
        columns: What the task measures.

    Returns:
        A row for each cell with at least one sample.
    """
    first = cells[0].samples if cells else ()
    return [
        _row(cell, cell.samples, first, columns, timing=cell.timing)
        for cell in cells
        if cell.samples
    ]


def break_down(
    cells: Sequence[PooledCell],
    columns: Sequence[Column] = (ACCURACY,),
    *,
    facets: Collection[str] | None = None,
) -> list[Row]:
    """Summarise cells of one model and task by the values of facets.

    Args:
        cells: The cells; `Row.difference` is from the first one.
        columns: What the task measures.
        facets: Names of the facets, or of parts of samples; all if not given.

    Returns:
        Rows in the order of facets, values and cells, without timings. A facet's rows contain
        every sample that has the facet once, or each of its parts.
    """
    groups: dict[tuple[str, int | str], list[list[Sample]]] = {}
    for i, cell in enumerate(cells):
        for facet in cell.facets if facets is None else facets:
            for value, parts in cell.by_facet(facet).items():
                groups.setdefault((facet, value), [[] for _ in cells])[i] += parts
    return [
        _row(cell, samples, by_cell[0], columns, facet=facet, facet_value=value)
        for (facet, value), by_cell in sorted(
            groups.items(), key=lambda group: (group[0][0], facet_order(group[0][1]))
        )
        for cell, samples in zip(cells, by_cell, strict=True)
        if samples
    ]


def tabulate_runs(cells: Iterable[PooledCell], facet: str | None = None) -> list[Row]:
    """Summarise cells of any models and tasks.

    Args:
        cells: The cells; `Row.difference` is from the first cell of the same model and task.
        facet: Break down by this facet, if given.
    """
    rows: list[Row] = []
    for block in blocks_of(cells):
        columns = columns_of(block[0].group)
        if facet is None:
            rows += tabulate(block, columns)
        else:
            rows += break_down(block, columns, facets=(facet,))
    return rows


def to_records(rows: Sequence[Row], *, flat: bool = False) -> list[dict[str, Any]]:
    """Rows as plain data: the plan, then the fields of `Row` from ``n`` on.

    Args:
        rows: The rows.
        flat: Give an interval as three entries ``NAME``, ``NAME_low`` and ``NAME_high``, for CSV,
            instead of ``{"value", "low", "high"}``.

    Returns:
        Records, with the columns of the task in place of ``measured``.
    """
    return [_to_record(row, flat) for row in rows]


def to_run_records(rows: Sequence[Row], *, flat: bool = False) -> list[dict[str, Any]]:
    """Rows of `tabulate_runs` as plain data: what was evaluated, then as `to_records`.

    Args:
        rows: The rows.
        flat: As in `to_records`; lists become texts with spaces.
    """
    join: Callable[[Sequence[Any]], Any] = _spaced if flat else list
    records = []
    for row, record in zip(rows, to_records(rows, flat=flat), strict=True):
        cell = row.cell
        evaluated = {
            "runs": join(cell.runs),
            "version": cell.version,
            "model": cell.group.model,
            "task": cell.group.task,
            "split": cell.group.split,
            "seeds": join(cell.seeds),
            "cells": join(cell.cells),
        }
        if row.facet is None:
            records.append(evaluated | record | {"num_expected": cell.num_expected})
        else:
            facet = {"facet": row.facet, "facet_value": row.facet_value}
            records.append(evaluated | facet | record)
    return records


def csv_text(records: Sequence[Mapping[str, Any]], names: Iterable[str] | None = None) -> str:
    """Records as CSV; ``None`` is an empty field, truths are ``true`` and ``false``.

    Args:
        records: The records.
        names: Names of the columns; by default every name that occurs.
    """
    header = list(names or dict.fromkeys(name for record in records for name in record))
    # pandas, duckdb and spreadsheets read `true` as a truth.
    texts = {True: "true", False: "false"}
    lines: list[list[Any]] = [
        [texts[value] if isinstance(value, bool) else value for value in map(record.get, header)]
        for record in records
    ]
    return "".join(map(csv_line, [header, *lines]))


def csv_line(fields: Iterable[Any]) -> str:
    r"""One line of CSV, which ends in ``\n``; texts that spreadsheets would compute are guarded."""
    line = io.StringIO()
    # csv quotes the characters of its line terminator; readers end a line at either of these.
    csv.writer(line, lineterminator="\r\n").writerow(map(_guarded, fields))
    return line.getvalue().removesuffix("\r\n") + "\n"


def _guarded(field: Any) -> Any:
    """A text with an apostrophe before it if a spreadsheet would take it for a formula.

    A number in a column of texts, such as ``-0.5``, stays as it is.

    Source: https://owasp.org/www-community/attacks/CSV_Injection.
    """
    if not isinstance(field, str) or not field.startswith(_FORMULA) or _is_number(field):
        return field
    return f"'{field}"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", text, re.ASCII) is not None


def _row(
    cell: PooledCell,
    samples: Sequence[Sample],
    first: Sequence[Sample],
    columns: Sequence[Column],
    *,
    timing: CellTiming | None = None,
    facet: str | None = None,
    facet_value: int | str = "",
) -> Row:
    n = len(samples)
    finished = [sample for sample in samples if sample.finish_reason != "error"]
    compacted = [sample for sample in samples if sample.compactions]
    is_first = samples is first
    return Row(
        cell=cell,
        columns=columns,
        facet=facet,
        facet_value=facet_value,
        n=n,
        num_items=len({sample.item for sample in samples}),
        num_correct=_num_correct(samples),
        num_errors=n - len(finished),
        num_ungraded=sum(sample.ungraded is not None for sample in finished),
        measured={column.name: column.estimate(samples) for column in columns},
        compacted=columns[0].estimate(compacted),
        num_compacted=len(compacted),
        difference=None if is_first else paired_difference(columns[0], samples, first),
        length=LENGTH.estimate(samples),
        truncated=sum(sample.finish_reason == "length" for sample in finished) / n,
        compactions=sum(sample.compactions for sample in finished) / max(len(finished), 1),
        peak_bytes=max((sample.peak_bytes for sample in finished), default=0),
        peak_kv_bytes=timing.peak_kv_bytes if timing else None,
        throughput_tok_s=timing.throughput_tok_s if timing else None,
        policy_share=timing.policy_share if timing else None,
    )


def _num_correct(samples: Sequence[Sample]) -> int | None:
    is_graded = any(s.correct is not None or s.ungraded is not None for s in samples)
    return sum(bool(sample.correct) for sample in samples) if is_graded else None


def _to_record(row: Row, flat: bool) -> dict[str, Any]:
    plan = row.cell.record
    return {
        "series": plan.series,
        "budget": plan.budget,
        "buffer": plan.buffer,
        "bytes_per_sequence": plan.bytes_per_sequence,
        "byte_limits": _spaced(plan.byte_limits) if flat else list(plan.byte_limits),
        "plan": plan.plan,
        "n": row.n,
        "num_items": row.num_items,
        "num_correct": row.num_correct,
        "num_errors": row.num_errors,
        "num_ungraded": row.num_ungraded,
        **_intervals(row.measured, flat),
        **_intervals({"compacted": row.compacted}, flat),
        "num_compacted": row.num_compacted,
        **_intervals({"difference": row.difference, "length": row.length}, flat),
        "truncated": row.truncated,
        "compactions": row.compactions,
        "peak_bytes": row.peak_bytes,
        "peak_kv_bytes": row.peak_kv_bytes,
        "throughput_tok_s": row.throughput_tok_s,
        "policy_share": row.policy_share,
    }


def _intervals(found: Mapping[str, Interval | None], flat: bool) -> dict[str, Any]:
    if not flat:
        return {name: one and attrs.asdict(one) for name, one in found.items()}
    entries: dict[str, Any] = {}
    for name, one in found.items():
        ends = (None, None, None) if one is None else attrs.astuple(one)
        entries |= zip((name, f"{name}_low", f"{name}_high"), ends, strict=True)
    return entries


def _spaced(values: Sequence[object]) -> str:
    return " ".join(map(str, values))
