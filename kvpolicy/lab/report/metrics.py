"""Quantities of a cell: the task's metrics, then length, memory and speed."""

import math
from collections.abc import Callable, Sequence

import attrs

from kvpolicy.lab.analysis.pooling import PooledCell, columns_of
from kvpolicy.lab.statistics import Interval, mean, ratio
from kvpolicy.lab.store.records import CellTiming, EvalSettingRecord, Sample
from kvpolicy.lab.tasks.task import LENGTH, Column, mean_by_example, sums_by_example

MEMORY = "peak_bytes"


@attrs.frozen
class Quantity:
    """One quantity of a cell.

    Attributes:
        name: Its name in the data of the page.
        title: Heading of its table column.
        heading: Heading of its chart, with the unit.
        kind: Format of its values: ``share``, ``number``, ``tokens``, ``bytes`` or ``rate``.
        estimate: Its value, with an interval if its variation is known; ``None`` if the cell
            has no value.
        note: Explanation for the reader.
        charted: Whether it has a chart; every quantity has a table column.
        more_is_better: Whether a larger value is a better one, for the frontier.
    """

    name: str
    title: str
    heading: str
    kind: str
    estimate: Callable[[PooledCell], Interval | float | None]
    note: str = ""
    charted: bool = True
    more_is_better: bool = False

    def to_dict(self) -> dict[str, str | bool]:
        """Plain data for the page."""
        return attrs.asdict(self, filter=lambda field, _: field.name != "estimate")


def quantities(group: EvalSettingRecord) -> list[Quantity]:
    """All quantities of a group's cells; the first is the one that is compared."""
    return [*map(_measured, columns_of(group)), *_COSTS]


def plain(estimate: Interval | float | None) -> list[float | None] | None:
    """An estimate as plain data: value and ends of the interval, ``None`` where unknown."""
    if estimate is None:
        return None
    if not isinstance(estimate, Interval):
        return [estimate, None, None] if math.isfinite(estimate) else None
    if not math.isfinite(estimate.value):
        return None
    ends = (estimate.low, estimate.high)
    is_known = all(map(math.isfinite, ends))
    return [estimate.value, *(ends if is_known else (None, None))]


def throughput(timings: Sequence[CellTiming]) -> Interval | float | None:
    """Tokens per second of all slots.

    Args:
        timings: Timings of a cell's uninterrupted runs, one for each seed.

    Returns:
        All tokens divided by all seconds, with the range over seeds: a confidence interval from
        two or three seeds would be many times as wide. The number alone for one seed; ``None``
        without timings.
    """
    timed = [one for one in timings if one.elapsed_s > 0]
    if not timed:
        return None
    total = sum(one.new_tokens for one in timed) / sum(one.elapsed_s for one in timed)
    if len(timed) == 1:
        return total
    rates = [one.new_tokens / one.elapsed_s for one in timed]
    return Interval(total, min(rates), max(rates))


def _measured(column: Column) -> Quantity:
    def estimate(cell: PooledCell) -> Interval | None:
        return column.estimate(cell.samples)

    kind = "share" if column.is_share else "number"
    return Quantity(
        column.name,
        column.title,
        column.heading,
        kind,
        estimate,
        more_is_better=column.more_is_better,
    )


def _memory(cell: PooledCell) -> Interval | None:
    """Mean over items: attempts at one item are not independent."""
    held = mean_by_example(cell.samples, lambda one: one.peak_bytes if _is_complete(one) else None)
    return mean(list(held.values()), least=0) if held else None


def _is_complete(sample: Sample) -> bool:
    return sample.finish_reason != "error"


def _speed(cell: PooledCell) -> Interval | None:
    sums = sums_by_example(cell.samples, _tokens_and_seconds).values()
    return ratio(*zip(*sums, strict=True), least=0) if sums else None


def _tokens_and_seconds(sample: Sample) -> tuple[float, float] | None:
    """Decode steps after a sample's first token, and their seconds."""
    is_timed = _is_complete(sample) and sample.num_tokens > 1 and sample.decode_s > 0
    return (sample.num_tokens - 1, sample.decode_s) if is_timed else None


_ONCE = "Measured once for each cell that was run without interruption"
_COSTS = (
    Quantity(
        "length",
        "tokens",
        "Mean length, tokens",
        "tokens",
        lambda cell: LENGTH.estimate(cell.samples),
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
        lambda cell: throughput(cell.timings),
        f"{_ONCE}; bars are the range over seeds, not an interval.",
    ),
    Quantity(
        "speed",
        "tokens/s of a sample",
        "Speed of a sample, tokens/s",
        "rate",
        _speed,
        "Decoded tokens of a sample per second, while other slots decode, too.",
    ),
    Quantity(
        "peak_kv_bytes",
        "cache of all slots",
        "Peak KV bytes of all slots",
        "bytes",
        lambda cell: cell.timing.peak_kv_bytes if cell.timing else None,
        f"{_ONCE}, so it has no interval.",
        charted=False,
    ),
)
