"""`PolicyTimings`: seconds that policies take, by hook."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch

# Intervals on a GPU that are not read yet, at most; the first half of them is over long since.
_MOST_PENDING = 4096


@attrs.define
class PolicyTimings:
    """Seconds spent in each kind of policy work, and in all of it within decode steps.

    Work on a GPU is timed by events, which are read when the seconds are: nothing waits before.
    """

    annotate_s: float = 0.0
    observe_s: float = 0.0
    lookahead_s: float = 0.0
    score_s: float = 0.0
    select_s: float = 0.0
    compaction_s: float = 0.0
    steer_s: float = 0.0
    decode_policy_s: float = 0.0
    _pending: "list[_Interval]" = attrs.field(factory=list, init=False, eq=False, repr=False)
    _is_decoding: bool = attrs.field(default=False, init=False, eq=False, repr=False)

    def read(self) -> dict[str, float]:
        """All seconds by name."""
        self._read_pending(len(self._pending))
        return {name: getattr(self, name) for name in _public_names()}

    @property
    def policy_s(self) -> float:
        """Seconds of all kinds of work."""
        seconds = self.read()
        return sum(seconds[f"{kind}_s"] for kind in KINDS)

    def take(self, other: "PolicyTimings") -> None:
        """Continue from the seconds of another clock."""
        for name, seconds in other.read().items():
            setattr(self, name, seconds)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Count the policy work of a ``with`` block as work within a decode step."""
        self._is_decoding = True
        try:
            yield
        finally:
            self._is_decoding = False

    @contextmanager
    def time(self, part: str, device: torch.device | None) -> Iterator[None]:
        """Add the seconds of a ``with`` block.

        Args:
            part: Name of the attribute.
            device: Device whose time is measured if it is a GPU; otherwise it is the host's.
        """
        if device is not None and device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            start = stream.record_event(torch.cuda.Event(enable_timing=True))
            yield
            end = stream.record_event(torch.cuda.Event(enable_timing=True))
            self._pending.append(_Interval(part, start, end, self._is_decoding))
            if len(self._pending) > _MOST_PENDING:
                self._read_pending(_MOST_PENDING // 2)
            return
        begun = time.perf_counter()
        yield
        self._add(part, time.perf_counter() - begun, self._is_decoding)

    def _add(self, part: str, seconds: float, in_decode: bool) -> None:
        setattr(self, part, getattr(self, part) + seconds)
        if in_decode:
            self.decode_policy_s += seconds

    def _read_pending(self, num: int) -> None:
        for one in self._pending[:num]:
            self._add(one.part, one.seconds, one.in_decode)
        del self._pending[:num]


def _public_names() -> list[str]:
    return [one.name for one in attrs.fields(PolicyTimings) if not one.name.startswith("_")]


#: The kinds of policy work that are timed: hooks, and the moving of rows.
KINDS = tuple(name.removesuffix("_s") for name in _public_names() if name != "decode_policy_s")


@attrs.frozen(eq=False)
class _Interval:
    """A ``with`` block whose work a GPU may not have done yet."""

    part: str
    start: torch.cuda.Event
    end: torch.cuda.Event
    in_decode: bool

    @property
    def seconds(self) -> float:
        """Its length; waits until the work is done."""
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3


def synchronize(device: torch.device | None) -> None:
    """Wait until a device has finished its work; does nothing for ``None`` and the CPU."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
