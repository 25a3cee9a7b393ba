"""What a report says of a cell: the task's columns, then length, memory and speed."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs

from kvpolicy.lab.agreement import Agreement
from kvpolicy.lab.measures import ACCURACY, Column, mean_of
from kvpolicy.lab.perplexity import Perplexity
from kvpolicy.lab.records import ColumnInfo
from kvpolicy.lab.report.gather import CellView
from kvpolicy.lab.samples import CellTiming, Sample
from kvpolicy.lab.stats import Estimate, mean, ratio

MEMORY = "peak_bytes"


@attrs.frozen
class Quantity:
    """One quantity of a cell.

    Attributes:
        name: Its name in the page.
        title: What tables call it.
        heading: What charts call it, with its unit.
        kind: How its values read: ``share``, ``number``, ``tokens``, ``bytes`` or ``rate``.
        estimate: Its value with an interval, or alone where nothing is known of how it varies;
            ``None`` if the cell has none.
        note: What a reader has to know about it.
        charted: Whether it is drawn against the budget; in the table it always is.
    """

    name: str
    title: str
    heading: str
    kind: str
    estimate: Callable[[CellView], Estimate | float | None]
    note: str = ""
    charted: bool = True

    def to_dict(self) -> dict[str, str | bool]:
        """Plain data for the page."""
        return attrs.asdict(self, filter=lambda field, _: field.name != "estimate")


def quantities(columns: Sequence[ColumnInfo]) -> list[Quantity]:
    """All quantities of a group's cells.

    Args:
        columns: What its task measures.
    """
    return [*(_measured(column_of(info)) for info in columns), *_COSTS]


def column_of(info: ColumnInfo) -> Column:
    """A column as its measure knows it; of a measure that is not ours, the mean of its values.

    Args:
        info: What a manifest says of it.
    """
    known = [ACCURACY, *Perplexity().columns, *Agreement().columns]
    for column in known:
        if (column.name, column.heading) == (info.name, info.heading):
            return column
    return mean_of(info.name, info.title, info.heading, is_share=info.is_share)


def plain(estimate: Estimate | float | None) -> list[float | None] | None:
    """An estimate for the page: value and interval, whose ends may be unknown."""
    if estimate is None:
        return None
    if not isinstance(estimate, Estimate):
        return [estimate, None, None] if math.isfinite(estimate) else None
    if not math.isfinite(estimate.value):
        return None
    ends = (estimate.low, estimate.high)
    is_known = all(map(math.isfinite, ends))
    return [estimate.value, *(ends if is_known else (None, None))]


def _measured(column: Column) -> Quantity:
    def estimate(view: CellView) -> Estimate | None:
        return column.estimate(list(view.samples.values()))

    kind = "share" if column.is_share else "number"
    return Quantity(column.name, column.title, column.heading, kind, estimate)


def served(samples: Collection[Any]) -> list[Any]:
    """The samples that did not fail."""
    return [sample for sample in samples if sample.finish_reason != "error"]


def _mean_of_served(value: Callable[[Sample], float]) -> Callable[[CellView], Estimate | None]:
    def estimate(view: CellView) -> Estimate | None:
        found = [value(sample) for sample in served(view.samples.values())]
        return mean(found) if found else None

    return estimate


def _of_timing(value: Callable[[CellTiming], float]) -> Callable[[CellView], float | None]:
    return lambda view: value(view.timing) if view.timing else None


def _throughput(timing: CellTiming) -> float:
    return timing.new_tokens / timing.elapsed_s if timing.elapsed_s else math.nan


def _speed(view: CellView) -> Estimate | None:
    timed = [sample for sample in served(view.samples.values()) if sample.decode_s > 0]
    if not timed:
        return None
    return ratio([sample.num_tokens for sample in timed], [sample.decode_s for sample in timed])


_ONCE = "Measured once for each cell that was run in one go, and so without an interval."
_COSTS = (
    Quantity(
        "length",
        "tokens",
        "Mean length, tokens",
        "tokens",
        _mean_of_served(lambda sample: sample.num_tokens),
    ),
    Quantity(
        MEMORY,
        "KV/sample",
        "Peak KV bytes of a sample, mean",
        "bytes",
        _mean_of_served(lambda sample: sample.peak_bytes),
    ),
    Quantity(
        "throughput",
        "tokens/s",
        "Throughput of all slots, tokens/s",
        "rate",
        _of_timing(_throughput),
        _ONCE,
    ),
    Quantity(
        "speed",
        "tokens/s of a sample",
        "Speed of a sample, tokens/s",
        "rate",
        _speed,
        "New tokens over seconds from a sample's first token to its last, other slots at work.",
    ),
    Quantity(
        "peak_kv_bytes",
        "cache of all slots",
        "Peak KV bytes of all slots",
        "bytes",
        _of_timing(lambda timing: timing.peak_kv_bytes),
        _ONCE,
        charted=False,
    ),
)
