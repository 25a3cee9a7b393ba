"""From samples to the comparison: one row for each cell."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import attrs

from kvpolicy.lab.analysis.csvtext import csv_text
from kvpolicy.lab.analysis.paired_difference import paired_difference
from kvpolicy.lab.statistics import Estimate
from kvpolicy.lab.store.records import CellTiming, Sample
from kvpolicy.lab.tasks.measures import ACCURACY, LENGTH, Column


class Compared(Protocol):
    """What a table has to know of a cell, whether it is run now or was long ago."""

    @property
    def id(self) -> str:
        """What its samples call it."""

    @property
    def series(self) -> str:
        """Which line of the plot it is a point of."""

    @property
    def budget(self) -> float | None:
        """Rows that stay after a compaction; ``None`` if everything stays."""

    @property
    def buffer(self) -> float | None:
        """Rows that may join before the next compaction; ``None`` likewise."""

    @property
    def digest(self) -> str:
        """Digest of the resolved plan."""


@attrs.frozen
class Row:
    """One cell of the comparison, measured.

    Attributes:
        series: Which line of the plot the cell is a point of.
        budget: Rows that stay after a compaction (the mean over the layers); ``None`` if
            everything stays.
        buffer: Rows that may join before the next compaction; ``None`` likewise.
        plan: Digest of the resolved plan.
        n: Samples, failed ones included.
        num_items: Items they are samples of; fewer where each is asked several times.
        num_correct: How many of them were right; ``None`` where nothing is graded.
        num_errors: How many failed; they count as not right.
        num_ungraded: On how many the grader had no verdict; they count as not right.
        measured: What the task measures, by name of the column: the share of right answers as
            ``accuracy``, for example; ``None`` where no sample has a value.
        difference: The first of these less that of the first cell, paired by item, as
            `paired_difference` says; ``None`` for that cell itself, and where the two have no
            item in common.
        length: Mean number of generated tokens, over items, of samples that did not fail.
        truncated: Share that was cut off at the most tokens allowed.
        compactions: Mean number of compactions of a sample.
        peak_bytes: Bytes of keys and values of the sample that held most.
        peak_kv_bytes: Bytes of the cache of all slots; ``None`` if the cell was interrupted.
        throughput_tok_s: Generated tokens per second; ``None`` likewise.
        policy_share: Part of the decode time spent on policies; ``None`` likewise.
    """

    series: str
    budget: float | None
    buffer: float | None
    plan: str
    n: int
    num_items: int
    num_correct: int | None
    num_errors: int
    num_ungraded: int
    measured: dict[str, Estimate | None]
    difference: Estimate | None
    length: Estimate | None
    truncated: float
    compactions: float
    peak_bytes: int
    peak_kv_bytes: int | None
    throughput_tok_s: float | None
    policy_share: float | None


def tabulate(
    cells: Sequence[Compared],
    samples: Collection[Sample],
    timings: Mapping[str, CellTiming],
    columns: Sequence[Column] = (ACCURACY,),
) -> list[Row]:
    """Summarise the samples of every cell that has any.

    Args:
        cells: The cells, in the order of the table.
        samples: What is done.
        timings: What the cells cost, by id, of those that were run in one go.
        columns: What the task measures.

    Returns:
        A row for each cell with at least one sample.
    """
    of_cell: dict[str, list[Sample]] = {}
    for sample in samples:
        of_cell.setdefault(sample.cell, []).append(sample)
    reference = of_cell.get(cells[0].id, []) if cells else []
    return [
        _row(cell, of_cell[cell.id], timings.get(cell.id), reference, columns)
        for cell in cells
        if cell.id in of_cell
    ]


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain data: the fields of `Row`, estimates as ``{"value", "low", "high"}``.

    What the task measures stands among the fields, in the place of ``measured``.
    """
    records = []
    for row in rows:
        record: dict[str, Any] = {}
        for name, value in attrs.asdict(row).items():
            record |= value if name == "measured" else {name: value}
        records.append(record)
    return records


def to_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV: as `to_json`, estimates as three columns."""
    names = estimates_of(rows)
    return write_csv([flat(record, names) for record in to_json(rows)])


def estimates_of(rows: Sequence[Row]) -> set[str]:
    """Names of what has an interval, in the records of rows."""
    return {"difference", "length", *(name for row in rows for name in row.measured)}


def write_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV, with a column for every name that occurs."""
    names = list(dict.fromkeys(name for record in records for name in record))
    return csv_text(names, ([record.get(name) for name in names] for record in records))


def flat(record: Mapping[str, Any], estimates: Collection[str]) -> dict[str, Any]:
    """A record whose estimates are three columns each: ``NAME``, ``NAME_low``, ``NAME_high``.

    Args:
        record: The record.
        estimates: Names of those, which may be ``None``.
    """
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if name in estimates:
            ends = value or {"value": None, "low": None, "high": None}
            flat |= {name: ends["value"], f"{name}_low": ends["low"]}
            flat[f"{name}_high"] = ends["high"]
        else:
            flat[name] = value
    return flat


def _row(
    cell: Compared,
    samples: Sequence[Sample],
    timing: CellTiming | None,
    reference: Sequence[Sample],
    columns: Sequence[Column],
) -> Row:
    n = len(samples)
    served = [sample for sample in samples if sample.finish_reason != "error"]
    return Row(
        series=cell.series,
        budget=cell.budget,
        buffer=cell.buffer,
        plan=cell.digest,
        n=n,
        num_items=len({sample.item for sample in samples}),
        num_correct=_num_correct(samples),
        num_errors=n - len(served),
        num_ungraded=sum(sample.ungraded is not None for sample in served),
        measured={column.name: column.estimate(samples) for column in columns},
        difference=None
        if samples is reference
        else paired_difference(columns[0], samples, reference),
        length=LENGTH.estimate(samples),
        truncated=sum(sample.finish_reason == "length" for sample in served) / n,
        compactions=sum(sample.compactions for sample in served) / max(len(served), 1),
        peak_bytes=max((sample.peak_bytes for sample in served), default=0),
        peak_kv_bytes=timing.peak_kv_bytes if timing else None,
        throughput_tok_s=timing.new_tokens / timing.elapsed_s if timing else None,
        policy_share=timing.policy_s / timing.decode_s if timing and timing.decode_s else None,
    )


def _num_correct(samples: Sequence[Sample]) -> int | None:
    is_graded = any(s.correct is not None or s.ungraded is not None for s in samples)
    return sum(bool(sample.correct) for sample in samples) if is_graded else None
