"""Where the time of policies goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch


@attrs.define
class Clock:
    """Seconds spent in each part of the policies' work, and in all of it within decode steps."""

    observe_s: float = 0.0
    score_s: float = 0.0
    select_s: float = 0.0
    compaction_s: float = 0.0
    steer_s: float = 0.0
    decode_policy_s: float = 0.0

    @property
    def policy_s(self) -> float:
        """Seconds in all parts."""
        compacting = self.score_s + self.select_s + self.compaction_s
        return self.observe_s + compacting + self.steer_s

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Count what policies do in a block as done within a decode step."""
        before = self.policy_s
        yield
        self.decode_policy_s += self.policy_s - before

    @contextmanager
    def time(self, part: str, device: torch.device | None) -> Iterator[None]:
        """Add the seconds of a block to a part.

        Args:
            part: Name of the attribute.
            device: What to wait for before and after, so that the seconds are real; ``None``
                counts what the host does, and waits for nothing.
        """
        wait_for(device)
        start = time.perf_counter()
        yield
        wait_for(device)
        setattr(self, part, getattr(self, part) + time.perf_counter() - start)


def wait_for(device: torch.device | None) -> None:
    """Wait until a device has done what it was asked to; ``None`` and the CPU always have."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
