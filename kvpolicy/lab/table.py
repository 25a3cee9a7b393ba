"""From samples to the comparison: one row for each cell."""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.lab.grid import Cell
from kvpolicy.lab.samples import CellTiming, Sample
from kvpolicy.lab.stats import Estimate, mean, paired_difference, wilson


@attrs.frozen
class Row:
    """One cell of the comparison, measured.

    Attributes:
        series: Which line of the plot the cell is a point of.
        budget: Rows that stay after a compaction (the mean over the layers); ``None`` if
            everything stays.
        buffer: Rows that may join before the next compaction; ``None`` likewise.
        digest: Digest of the resolved plan.
        n: Samples, failed ones included.
        num_correct: How many of them were right.
        num_errors: How many failed; they count as not right.
        accuracy: Share that was right, with its Wilson interval.
        difference: Accuracy less that of the first cell, paired by item; ``None`` for that
            cell itself, and where the two have no item in common.
        length: Mean number of generated tokens of those that did not fail.
        truncated: Share that was cut off at the most tokens allowed.
        compactions: Mean number of compactions of a sample.
        peak_bytes: Bytes of keys and values of the sample that held most.
        peak_kv_bytes: Bytes of the cache of all slots; ``None`` if the cell was interrupted.
        throughput_tok_s: Generated tokens per second; ``None`` likewise.
        policy_share: Part of the decode time spent in the policy; ``None`` likewise.
    """

    series: str
    budget: float | None
    buffer: float | None
    digest: str
    n: int
    num_correct: int
    num_errors: int
    accuracy: Estimate
    difference: Estimate | None
    length: Estimate | None
    truncated: float
    compactions: float
    peak_bytes: int
    peak_kv_bytes: int | None
    throughput_tok_s: float | None
    policy_share: float | None


def tabulate(
    cells: Sequence[Cell], samples: Collection[Sample], timings: Mapping[str, CellTiming]
) -> list[Row]:
    """Summarise the samples of every cell that has any.

    Args:
        cells: The cells, in the order of the table.
        samples: What is done.
        timings: What the cells cost, by digest, of those that were run in one go.

    Returns:
        A row for each cell with at least one sample.
    """
    of_cell: dict[str, list[Sample]] = {}
    for sample in samples:
        of_cell.setdefault(sample.cell, []).append(sample)
    reference = of_cell.get(cells[0].digest, []) if cells else []
    return [
        _row(cell, of_cell[cell.digest], timings.get(cell.digest), reference)
        for cell in cells
        if cell.digest in of_cell
    ]


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain data: the fields of `Row`, estimates as ``{"value", "low", "high"}``."""
    return [attrs.asdict(row) for row in rows]


def to_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV: the fields of `Row`, estimates as three columns."""
    out = io.StringIO()
    records = [_flat(record) for record in to_json(rows)]
    names = dict.fromkeys(name for record in records for name in record)
    writer = csv.DictWriter(out, fieldnames=list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _row(
    cell: Cell,
    samples: Sequence[Sample],
    timing: CellTiming | None,
    reference: Sequence[Sample],
) -> Row:
    n = len(samples)
    served = [sample for sample in samples if sample.finish_reason != "error"]
    num_correct = sum(sample.correct for sample in served)
    return Row(
        series=cell.series,
        budget=cell.budget,
        buffer=cell.buffer,
        digest=cell.digest,
        n=n,
        num_correct=num_correct,
        num_errors=n - len(served),
        accuracy=wilson(num_correct, n),
        difference=None if samples is reference else _difference(samples, reference),
        length=mean([sample.num_tokens for sample in served]) if served else None,
        truncated=sum(sample.finish_reason == "length" for sample in served) / n,
        compactions=sum(sample.compactions for sample in served) / max(len(served), 1),
        peak_bytes=max((sample.peak_bytes for sample in served), default=0),
        peak_kv_bytes=timing.peak_kv_bytes if timing else None,
        throughput_tok_s=timing.new_tokens / timing.elapsed_s if timing else None,
        policy_share=timing.policy_s / timing.decode_s if timing and timing.decode_s else None,
    )


def _difference(samples: Sequence[Sample], reference: Sequence[Sample]) -> Estimate | None:
    """Accuracy less that of the reference, on the items that both have done."""
    right = {sample.item: float(sample.correct) for sample in reference}
    pairs = [(float(s.correct), right[s.item]) for s in samples if s.item in right]
    return paired_difference(*zip(*pairs, strict=True)) if pairs else None


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= {name: value["value"], f"{name}_low": value["low"]}
            flat[f"{name}_high"] = value["high"]
        else:
            flat[name] = value
    return flat
