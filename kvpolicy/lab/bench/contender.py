"""What one contender of a benchmark has done, and how long it took."""

import time
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

Prompts = Sequence[Sequence[int]]


@attrs.frozen
class Effort:
    """One batch of prompts, continued by so many tokens.

    The first decode step is not among the steps: it warms up what the others use.

    Attributes:
        prefill_s: Seconds until the first token of every sequence; ``None`` if there is none.
        steps_s: Seconds of each decode step but the first.
        kv_bytes: Bytes of the cache at its largest.
        read_bytes: Bytes of keys and values that those steps attended to.
        policy_share: Part of the decode time spent on policies; ``None`` if nobody measures it.
    """

    prefill_s: float | None
    steps_s: tuple[float, ...]
    kv_bytes: int
    read_bytes: int
    policy_share: float | None = None


@attrs.frozen
class Contender:
    """Somebody who can decode.

    Attributes:
        name: What tables call it.
        run: Continues prompts by so many tokens.
        budget: Rows that stay, if any leave.
        rival: Name of a contender with the same policy from another library, if there is one.
    """

    name: str
    run: Callable[[Prompts, int], Effort]
    budget: float | None = None
    rival: str | None = None


def now(device: torch.device) -> float:
    """The time, when a device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def pad(prompts: Prompts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts beside each other, padded on the left: ids and mask, ``[B, columns]`` each."""
    width = max(map(len, prompts))
    token_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return token_ids.to(device), mask.to(device)
