"""How fast a device copies its own memory, and the share of that which a decode step reaches."""

import time

import torch

_TRIALS = 8


def copy_bandwidth(device: torch.device, *, quick: bool = False) -> float:
    """Bytes read and written in a second by the fastest of several copies."""
    numbers = torch.ones((2**24 if quick else 2**32) // 4, device=device)
    copy = torch.empty_like(numbers)
    fastest = float("inf")
    for _ in range(_TRIALS):
        synchronize(device)
        started = time.perf_counter()
        copy.copy_(numbers)
        synchronize(device)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * numbers.nbytes / fastest


def least_step_s(weight_bytes: float, row_bytes: float, bytes_per_s: float) -> float:
    """The limit of a step: its weights and the rows that it holds are read once, at this speed."""
    return (weight_bytes + row_bytes) / bytes_per_s


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
