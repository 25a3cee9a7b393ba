"""Times of steps, and of compiling them."""

import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch._dynamo.utils import calculate_time_spent


def synchronized_time(device: torch.device) -> float:
    """Seconds on the performance counter, after all work queued on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def durations(times: Sequence[float]) -> tuple[float, ...]:
    """Seconds between successive times."""
    return tuple(after - before for before, after in pairwise(times))


def compiling_s() -> float:
    """Seconds in which torch has compiled so far in this process."""
    return calculate_time_spent()["total_wall_time"]
