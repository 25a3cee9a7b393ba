"""`PolicyTimings`: seconds that policies take, by hook."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch


@attrs.define
class PolicyTimings:
    """Seconds spent in each kind of policy work, and in all of it within decode steps."""

    observe_s: float = 0.0
    score_s: float = 0.0
    select_s: float = 0.0
    compaction_s: float = 0.0
    steer_s: float = 0.0
    decode_policy_s: float = 0.0

    @property
    def policy_s(self) -> float:
        """Seconds of all kinds."""
        compactions = self.score_s + self.select_s + self.compaction_s
        return self.observe_s + compactions + self.steer_s

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Count the policy work of a ``with`` block as work within a decode step."""
        before = self.policy_s
        yield
        self.decode_policy_s += self.policy_s - before

    @contextmanager
    def time(self, part: str, device: torch.device | None) -> Iterator[None]:
        """Add the seconds of a ``with`` block.

        Args:
            part: Name of the attribute.
            device: Device to synchronize before and after; ``None`` measures host time only.
        """
        synchronize(device)
        start = time.perf_counter()
        yield
        synchronize(device)
        setattr(self, part, getattr(self, part) + time.perf_counter() - start)


def synchronize(device: torch.device | None) -> None:
    """Wait until a device has finished its work; does nothing for ``None`` and the CPU."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
