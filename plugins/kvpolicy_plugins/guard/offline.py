"""Predictions made with knowledge of the whole trace, exact or noisy: for simulations only."""

import heapq
from collections.abc import Sequence

import numpy as np

from kvpolicy import Block


def next_requests(trace: Sequence[Block]) -> np.ndarray:
    """For each request the time of the next one for the same block; length + 1 if there is none.

    Args:
        trace: The blocks in the order of their requests; times count from 0.
    """
    times = np.empty(len(trace))
    following: dict[Block, int] = {}
    for time in range(len(trace) - 1, -1, -1):
        times[time] = following.get(trace[time], len(trace) + 1)
        following[trace[time]] = time
    return times


def with_noise(times: np.ndarray, sigma: float, *, lognormal: bool, seed: int) -> np.ndarray:
    """Times with independent noise added to each.

    Args:
        times: Exact times, in requests.
        sigma: Standard deviation of the noise in requests, or of its logarithm.
        lognormal: Whether ``exp(normal)`` is added, and not ``normal``.
        seed: Seed of numpy's older generator, whose numbers the authors' code draws.
    """
    if not sigma:
        return times
    generator = np.random.RandomState(seed)
    draw = generator.lognormal if lognormal else generator.normal
    noisy: np.ndarray = times + draw(0, sigma, size=len(times))
    return noisy


def belady_labels(trace: Sequence[Block], times: np.ndarray, capacity: int) -> np.ndarray:
    """Labels of requests: 1 if a store that evicts the latest time drops the block before the next.

    Args:
        trace: The blocks.
        times: Time of the next request for each; with exact ones the store is optimal.
        capacity: Blocks that it holds.
    """
    labels = np.zeros(len(trace))
    slots: dict[Block, int] = {}
    latest: dict[Block, int] = {}  # the newest request of each stored block
    ranked: list[tuple[float, int, int]] = []  # by falling time, then by place
    for now, block in enumerate(trace):
        if block not in slots:
            slot = len(slots)
            if slot == capacity:
                slot = _drop_latest(trace, slots, latest, ranked, labels)
            slots[block] = slot
        latest[block] = now
        heapq.heappush(ranked, (-times[now], slots[block], now))
    return labels


def _drop_latest(
    trace: Sequence[Block],
    slots: dict[Block, int],
    latest: dict[Block, int],
    ranked: list[tuple[float, int, int]],
    labels: np.ndarray,
) -> int:
    while True:
        _, _, time = heapq.heappop(ranked)
        block = trace[time]
        if latest.get(block) == time:
            labels[time] = 1
            del latest[block]
            return slots.pop(block)
