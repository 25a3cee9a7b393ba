"""Requests from their submission to a slot: those that wait, cancellations, deadlines."""

import heapq
import math
from collections import abc
from queue import Empty, SimpleQueue
from threading import Lock

from kvpolicy.engine.requests.results import FinishReason
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.errors import EngineClosedError, QueueFullError

# Tells the time in seconds.
Clock = abc.Callable[[], float]


class RequestQueue:
    """The requests of a run without a slot.

    `put`, `cancel`, `close` and `wake` may be called from any thread, `cancel` even from a
    finalizer; everything else belongs to the thread that runs the steps.

    Attributes:
        waiting: Sequences that wait for a slot, by number, in order of arrival.
        cancelled: Numbers of requests to end in the step that begins.
        num_submitted: Requests so far. They are numbered from 0 in order of arrival.
    """

    def __init__(self, clock: Clock, most_open: int | None = None) -> None:
        """An empty queue.

        Args:
            clock: Tells the time by which deadlines are checked.
            most_open: Requests without a result at most; ``None``: any number.
        """
        self.waiting: dict[int, Sequence] = {}
        self.cancelled: set[int] = set()
        self.num_submitted = 0
        self._closed_by: str | None = None
        self._clock, self._most_open = clock, most_open
        self._lock = Lock()
        self._open: dict[int, Sequence] = {}
        # Sequences that arrive, and numbers of those to cancel. Its `put` may interrupt itself.
        self._inbox: SimpleQueue[Sequence | int | None] = SimpleQueue()
        self._now = 0.0  # when the step began
        self._next_deadline = math.inf  # of an open request, or of one that has ended since

    @property
    def is_closed(self) -> bool:
        """Whether no request is accepted any more."""
        return self._closed_by is not None

    @property
    def num_open(self) -> int:
        """Requests without a result."""
        return len(self._open)

    def put(self, seq: Sequence) -> int:
        """Add a request, and number it.

        Raises:
            EngineClosedError: If the queue is closed.
            QueueFullError: If too many requests have no result yet.
        """
        with self._lock:
            if self._closed_by is not None:
                msg = f"no request is accepted any more: {self._closed_by}"
                raise EngineClosedError(msg)
            if self._most_open is not None and len(self._open) >= self._most_open:
                msg = (
                    f"the queue is full: {len(self._open)} requests run or wait already; try "
                    "again later, or allow a larger max_waiting"
                )
                raise QueueFullError(msg)
            seq.id = self.refuse()
            self._open[seq.id] = seq
            if seq.request.deadline_s is not None:
                seq.deadline = self._clock() + seq.request.deadline_s
            self._inbox.put(seq)
        return seq.id

    def refuse(self) -> int:
        """The number of a request that cannot be served."""
        self.num_submitted += 1
        return self.num_submitted - 1

    def cancel(self, number: int) -> None:
        """Have a request end at the next step."""
        self._inbox.put(number)

    def close(self, reason: str = "the engine has been closed") -> None:
        """Accept no more requests; a request that comes is told the reason, the first one given."""
        with self._lock:
            self._closed_by = self._closed_by or reason
        self.wake()

    def wake(self) -> None:
        """Have `wait` return."""
        self._inbox.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until something comes: a request, a cancellation, or the end."""
        try:
            self._take(self._inbox.get(timeout=timeout_s))
        except Empty:
            return

    def take_in(self) -> bool:
        """Take over what has come since the last step; returns whether any request may end now."""
        while not self._inbox.empty():
            self._take(self._inbox.get_nowait())
        self._now = self._clock()
        return bool(self.cancelled) or self._now >= self._next_deadline

    def in_order(self, most: int | None = None) -> list[Sequence]:
        """The waiting sequences, those of higher priority first, equal ones in order of arrival.

        Args:
            most: Only so many, the first ones; ``None``: all.
        """
        num = len(self.waiting) if most is None else most
        return heapq.nsmallest(num, self.waiting.values(), key=lambda seq: -seq.request.priority)

    def pop_ended(self) -> list[Sequence]:
        """Take out the waiting sequences that end now."""
        for seq in self.waiting.values():
            seq.finish_reason = self.reason_to_end(seq)
        ended = [seq for seq in self.waiting.values() if seq.finish_reason is not None]
        for seq in ended:
            del self.waiting[seq.id]
        return ended

    def reason_to_end(self, seq: Sequence) -> FinishReason | None:
        """Why a sequence ends now, if it does: it was cancelled, or its time is up."""
        if seq.id in self.cancelled:
            return "cancelled"
        if seq.deadline is not None and self._now >= seq.deadline:
            return "deadline"
        return None

    def forget_ends(self) -> None:
        """Note that what was to end has ended, and when the next deadline is."""
        self.cancelled.clear()
        deadlines = (seq.deadline for seq in self.open_sequences())
        self._next_deadline = min((one for one in deadlines if one is not None), default=math.inf)

    def open_sequences(self) -> list[Sequence]:
        """The sequences of all requests without a result, in order of arrival."""
        with self._lock:
            return list(self._open.values())

    def finish(self, number: int) -> None:
        """Note that a request has its result."""
        with self._lock:
            self._open.pop(number, None)

    def _take(self, came: Sequence | int | None) -> None:
        if isinstance(came, Sequence):
            self.waiting[came.id] = came
            if came.deadline is not None:
                self._next_deadline = min(self._next_deadline, came.deadline)
        elif came is not None:
            self.cancelled.add(came)
