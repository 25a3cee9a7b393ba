"""The largest batch within a limit of memory, at which the most tokens are made in a second.

Weights are read once for all sequences of a step, so that each further one adds to the speed. How
many fit is computed and not searched: filling a cache at each trial would take minutes.
"""

import attrs

from kvpolicy.lab.bench.contenders.contender import Contender
from kvpolicy.lab.bench.workload import Decode

# The name of the work at the batch that each contender has by itself.
LARGEST = "largest batch"


def largest_batch(contender: Contender, work: Decode, num_bytes: float, row_bytes: int) -> int:
    """How many sequences fit into a memory, by arithmetic; 0: not one.

    Args:
        contender: The contender; if it cannot tell better, its keys and values count.
        work: The work; its batch does not count.
        num_bytes: Bytes for keys and values.
        row_bytes: Bytes of one row in all layers.
    """
    alone = attrs.evolve(work, batch=1)
    alone = attrs.evolve(alone, steps=contender.num_steps(alone))
    if contender.batch_within is not None:
        return contender.batch_within(alone, num_bytes)
    tokens = work.held + alone.steps + 1
    rows = tokens if contender.budget is None else min(tokens, contender.budget)
    return int(num_bytes // (rows * row_bytes))


def smaller_batch(batch: int, kv_bytes: int | None, num_bytes: float) -> int:
    """The batch to try after one for which the memory was too small; it is smaller.

    Args:
        batch: What was tried.
        kv_bytes: What it has taken; ``None``: it could not be had.
        num_bytes: What it may take.
    """
    if kv_bytes is None:
        return batch * 7 // 8
    return min(int(batch * num_bytes // kv_bytes), batch - 1)
