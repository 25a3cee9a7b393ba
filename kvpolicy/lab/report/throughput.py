"""Throughput of a cell: an interval is known where several seeds of it were run."""

from collections.abc import Sequence

from kvpolicy.lab.statistics import Z_95, Interval, ratio
from kvpolicy.lab.store.records import CellTiming

# Student's t, of which 95 % lies within, for 1 to 10 degrees of freedom: seeds are few, and the
# normal distribution would make too much of them.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def throughput(timings: Sequence[CellTiming]) -> Interval | float | None:
    """Tokens per second of all slots.

    Args:
        timings: What a cell cost, each time that it was run in one go: once for each seed.

    Returns:
        All tokens over all seconds, with the 95 % interval in which seeds are what varies; the
        number alone if there is one seed; ``None`` if there is none.
    """
    timed = [one for one in timings if one.elapsed_s > 0]
    if not timed:
        return None
    found = ratio([one.new_tokens for one in timed], [one.elapsed_s for one in timed])
    if len(timed) == 1:
        return found.value
    half = (found.high - found.value) * student(len(timed) - 1) / Z_95
    return Interval(found.value, max(found.value - half, 0.0), found.value + half)


def student(degrees: int) -> float:
    """Within how many standard errors of a mean 95 % lies.

    Args:
        degrees: Degrees of freedom, at least 1.
    """
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    z, n = Z_95, degrees  # Abramowitz and Stegun 26.7.5, its first terms
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
