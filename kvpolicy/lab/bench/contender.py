"""Contenders of a benchmark, and their measurements."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import attrs
import torch

Prompts = Sequence[Sequence[int]]


@attrs.frozen
class Measurement:
    """Times and memory of one batch of prompts, continued by a number of tokens.

    Attributes:
        prefill_s: Seconds until the first token of every sequence; ``None`` without a prefill.
        steps_s: Seconds of each decode step but the first, which warms up the others.
        kv_bytes: Peak bytes of the cache.
        read_bytes: Bytes of keys and values that these steps attended to.
        policy_share: Share of the decode time spent on policies; ``None`` if not measured.
    """

    prefill_s: float | None
    steps_s: tuple[float, ...]
    kv_bytes: int
    read_bytes: int
    policy_share: float | None = None

    @property
    def mean_step_s(self) -> float:
        """Mean seconds of a decode step."""
        return sum(self.steps_s) / len(self.steps_s)


@attrs.frozen
class Contender:
    """An implementation to measure.

    Attributes:
        name: Name in tables.
        run: Function that continues prompts by a number of tokens.
        budget: Rows that stay; ``None`` if nothing is evicted.
        baseline: Name of the contender with the same policy from another library, if any.
        policy: Policy that gives it its colour in figures; empty for none.
    """

    name: str
    run: Callable[[Prompts, int], Measurement]
    budget: float | None = None
    baseline: str | None = None
    policy: str = ""


def synchronized_time(device: torch.device) -> float:
    """Seconds on the performance counter, after all work queued on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def durations(times: Sequence[float]) -> tuple[float, ...]:
    """Seconds between successive times."""
    return tuple(after - before for before, after in pairwise(times))
