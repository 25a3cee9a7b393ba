"""The batch at which a contender is fastest, within a limit of memory."""

from collections.abc import Callable

import attrs

from kvpolicy.errors import is_out_of_memory
from kvpolicy.lab.bench.contenders.contender import Contender
from kvpolicy.lab.bench.workload import Decode

_MOST_STEPS = 16  # of a trial: enough for the copy that a compaction makes


def best_batch(
    contender: Contender,
    work: Decode,
    limit_bytes: float,
    tell: Callable[[str], None] = lambda _: None,
) -> int | None:
    """Find the fastest batch whose cache stays within a limit.

    Args:
        contender: The contender.
        work: The work; its batch does not count.
        limit_bytes: The most bytes of keys and values, at their peak.
        tell: Told of each batch that was tried, in a line: a search takes minutes.

    Returns:
        The batch with the most tokens per second of those tried; ``None`` if one sequence is too
        large.
    """
    speeds: dict[int, float] = {}

    def fits(batch: int) -> bool:
        try:
            steps = min(work.steps, _MOST_STEPS)
            measured = contender.decode(attrs.evolve(work, batch=batch, steps=steps))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            tell(f"batch {batch}: not enough memory")
            return False
        if measured.kv_bytes > limit_bytes:
            tell(f"batch {batch}: {measured.kv_bytes / 1e9:.1f} GB, more than the limit")
            return False
        speeds[batch] = batch / measured.mean_step_s
        tell(f"batch {batch}: {speeds[batch]:.0f} tokens/s")
        return True

    largest_batch(fits)
    return max(speeds, key=lambda batch: speeds[batch], default=None)


def largest_batch(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, or one at most an eighth smaller.

    Args:
        fits: Whether a batch fits; if one does, all smaller ones do.

    Returns:
        The batch; 0 if not even one sequence fits.
    """
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
