"""What a report says of a cell: the task's columns, then length, memory and speed."""

import math
from collections.abc import Callable
from statistics import fmean

import attrs

from kvpolicy.lab.analysis.pooling import columns_of
from kvpolicy.lab.report.gather import CellView
from kvpolicy.lab.report.throughput import throughput
from kvpolicy.lab.statistics import Interval, mean, ratio
from kvpolicy.lab.store.records import EvalSettingRecord, Sample
from kvpolicy.lab.tasks.measures import LENGTH, Column, by_item

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
    estimate: Callable[[CellView], Interval | float | None]
    note: str = ""
    charted: bool = True

    def to_dict(self) -> dict[str, str | bool]:
        """Plain data for the page."""
        return attrs.asdict(self, filter=lambda field, _: field.name != "estimate")


def quantities(group: EvalSettingRecord) -> list[Quantity]:
    """All quantities of a group's cells, the one that is compared first.

    Args:
        group: The group.
    """
    return [*map(_measured, columns_of(group)), *_COSTS]


def plain(estimate: Interval | float | None) -> list[float | None] | None:
    """An estimate for the page: value and interval, whose ends may be unknown."""
    if estimate is None:
        return None
    if not isinstance(estimate, Interval):
        return [estimate, None, None] if math.isfinite(estimate) else None
    if not math.isfinite(estimate.value):
        return None
    ends = (estimate.low, estimate.high)
    is_known = all(map(math.isfinite, ends))
    return [estimate.value, *(ends if is_known else (None, None))]


def _measured(column: Column) -> Quantity:
    def estimate(view: CellView) -> Interval | None:
        return column.estimate(view.samples)

    kind = "share" if column.is_share else "number"
    return Quantity(column.name, column.title, column.heading, kind, estimate)


def _memory(view: CellView) -> Interval | None:
    """The mean over items, as attempts at one are alike."""
    held = by_item(view.samples, lambda one: one.peak_bytes if _is_served(one) else None)
    return mean([fmean(values) for values in held]) if held else None


def _is_served(sample: Sample) -> bool:
    return sample.finish_reason != "error"


def _speed(view: CellView) -> Interval | None:
    timed = by_item(view.samples, _tokens_and_seconds)
    if not timed:
        return None
    sums = [tuple(map(math.fsum, zip(*values, strict=True))) for values in timed]
    return ratio(*zip(*sums, strict=True))


def _tokens_and_seconds(sample: Sample) -> tuple[float, float] | None:
    """The steps between a sample's first token and its last, and what they took."""
    is_timed = _is_served(sample) and sample.num_tokens > 1 and sample.decode_s > 0
    return (sample.num_tokens - 1, sample.decode_s) if is_timed else None


_ONCE = "Measured once for each cell that was run in one go"
_COSTS = (
    Quantity(
        "length",
        "tokens",
        "Mean length, tokens",
        "tokens",
        lambda view: LENGTH.estimate(view.samples),
    ),
    Quantity(
        MEMORY,
        "KV/sample, mean",
        "Peak KV bytes of a sample, mean",
        "bytes",
        _memory,
    ),
    Quantity(
        "throughput",
        "tokens/s",
        "Throughput of all slots, tokens/s",
        "rate",
        lambda view: throughput(view.timings),
        f"{_ONCE}; the interval is that of several seeds.",
    ),
    Quantity(
        "speed",
        "tokens/s of a sample",
        "Speed of a sample, tokens/s",
        "rate",
        _speed,
        "Tokens after a sample's first one over the seconds that they took, other slots at work.",
    ),
    Quantity(
        "peak_kv_bytes",
        "cache of all slots",
        "Peak KV bytes of all slots",
        "bytes",
        lambda view: view.timing.peak_kv_bytes if view.timing else None,
        f"{_ONCE}, and so without an interval.",
        charted=False,
    ),
)
