"""A run to which requests are submitted while it goes on."""

import time

from kvpolicy.engine.core import EngineCore
from kvpolicy.engine.memory.footprint import slots_within
from kvpolicy.engine.requests.isolation import OnHookError
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.request_queue import Clock, RequestQueue
from kvpolicy.engine.requests.results import EngineStats, Events
from kvpolicy.engine.run import Run
from kvpolicy.errors import KVPolicyError


class OpenRun(Run):
    """A run to which requests may be submitted at any time; `Engine.open_run` makes one.

    `submit`, `cancel` and `close` may be called from any thread, while another runs the steps.
    Iterating over it serves what was submitted, and ends when nothing is left.

    Attributes:
        max_len: The most tokens of a sequence.
        max_prompt_len: The most tokens of a prompt.
    """

    takes_turns = True

    def __init__(
        self,
        engine: EngineCore,
        *,
        max_len: int | None = None,
        max_prompt_len: int | None = None,
        kv_memory: int | None = None,
        max_waiting: int | None = None,
        on_hook_error: OnHookError | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Allocate slabs; the arguments are those of `Engine.open_run`.

        Args:
            engine: Serves the requests.
            max_len: See there.
            max_prompt_len: See there.
            kv_memory: See there.
            max_waiting: See there.
            on_hook_error: See there.
            clock: Tells the time in seconds by which deadlines are checked.
        """
        positions = engine.adapter.max_positions
        self.max_len = _limit("max_len", max_len, 2, positions)
        self.max_prompt_len = _limit("max_prompt_len", max_prompt_len, 1, self.max_len)
        num_slots = engine.num_slots
        if kv_memory is not None:
            _limit("kv_memory", kv_memory, 1, None)
            num_slots = slots_within(
                kv_memory,
                engine.plan,
                engine.adapter,
                longest=self.max_len,
                longest_prompt=self.max_prompt_len,
            )
        most_open = None
        if max_waiting is not None:
            most_open = num_slots + _limit("max_waiting", max_waiting, 0, None)
        self.requests = ()
        self._set_up(
            engine,
            RequestQueue(clock, most_open),
            max_len=self.max_len,
            max_prompt_len=self.max_prompt_len,
            on_hook_error=on_hook_error,
        )
        self.batch = self._new_batch(num_slots, self.max_len, self.max_prompt_len)

    def submit(self, request: Request) -> int:
        """Have a request served; returns its number, counted from 0.

        It gets a result in any case, also if it is cancelled.

        Raises:
            RequestError: If it cannot be served.
            QueueFullError: If all slots are in use and ``max_waiting`` requests wait.
            EngineClosedError: If the run is closed.
        """
        return self._queue.put(self._arrivals.sequence_of(request))

    def close(self) -> None:
        """Accept no more requests; those that run or wait are served."""
        self._queue.close()

    @property
    def done(self) -> bool:
        """Whether the run is closed, and every request has its result, which was yielded."""
        return self._queue.is_closed and super().done

    @property
    def num_open(self) -> int:
        """Requests that run or wait."""
        return self._queue.num_open

    @property
    def stats(self) -> EngineStats:
        """What the run does, and what it has cost so far."""
        running, rows = len(self.batch.active), self.cache.rows.sum(axis=1)
        return EngineStats(
            waiting=self.num_open - running,
            running=running,
            slots=len(self.batch.slots),
            rows=tuple(rows.tolist()),
            held_bytes=int(rows @ self.cache.row_bytes),
            report=self.report,
        )

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until there is something to do: a request runs or waits, or the run is closed.

        Args:
            timeout_s: Wait no longer than so many seconds.
        """
        if not self.num_open and not self._queue.is_closed:
            self._queue.wait(timeout_s)

    def wake(self) -> None:
        """Have `wait` return."""
        self._queue.wake()

    def end(self, error: str) -> Events:
        """End all requests with an error; nothing can be served afterwards.

        For a run that broke in the middle of a step: what the step had brought is returned, too.
        """
        self._queue.close(error)
        # Wherever the step has left them: a request may have left the queue and have no slot yet.
        for seq in self._queue.open_sequences():
            seq.fail(error)
            self._finish(seq)
        self._queue.take_in()
        self._queue.waiting.clear()
        return self._take_events()


def _limit(name: str, value: int | None, least: int, most: int | None) -> int:
    """A limit of an open run, checked; the most there can be if it is not given."""
    if value is None and most is not None:
        return most
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        msg = f"open_run() was given {name}={value!r:.60}; expected an integer of at least {least}"
        raise KVPolicyError(msg)
    return value if most is None else min(value, most)
