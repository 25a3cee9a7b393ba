"""Traces by rule: the one that predictions ruin, and popular blocks that change."""

from collections.abc import Sequence

import numpy as np

from kvpolicy_plugins.guard.offline import next_requests
from kvpolicy_plugins.guard.predictors import Given

BLOW_UP_REQUESTS = 3999


def reversed_predictor(trace: Sequence[int]) -> Given:
    """The worst predictor: what is asked for next looks as if it were asked for last."""
    return Given(-next_requests(trace))


def blow_up(capacity: int, num_requests: int = BLOW_UP_REQUESTS) -> list[int]:
    """Fill the store, then ask for a new block and the first one in turn.

    The optimum misses ``capacity + 1`` times. With `reversed_predictor` an eviction that only
    follows predictions misses every time: of the two blocks it evicts the one that comes next.

    Args:
        capacity: Blocks of the store.
        num_requests: Requests after the store is full.
    """
    turns = [capacity if number % 2 == 0 else 0 for number in range(num_requests)]
    return [*range(capacity), *turns]


def drifting_popularity(
    num_requests: int, num_blocks: int, seed: int, *, exponent: float = 1.0, drift_every: int = 200
) -> list[int]:
    """Draws from Zipf's distribution, whose ranks change from time to time.

    Args:
        num_requests: Requests.
        num_blocks: Different blocks.
        seed: Seed.
        exponent: Of the distribution.
        drift_every: Requests after which a tenth of the ranks are dealt anew.
    """
    generator = np.random.default_rng(seed)
    shares = 1 / np.arange(1, num_blocks + 1) ** exponent
    shares /= shares.sum()
    blocks = np.arange(num_blocks)
    trace: list[int] = []
    while len(trace) < num_requests:
        trace += blocks[generator.choice(num_blocks, size=drift_every, p=shares)].tolist()
        moved = generator.choice(num_blocks, size=max(2, num_blocks // 10), replace=False)
        blocks[moved] = blocks[generator.permutation(moved)]
    return trace[:num_requests]
