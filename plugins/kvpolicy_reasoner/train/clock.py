"""The wall clock of a training run; nothing that the model depends on is decided by it."""

import time

from kvpolicy_reasoner.train.checkpoint import Progress


class RunClock:
    """Wall time of a run over all its sittings; decides nothing that the model depends on."""

    def __init__(self, progress: Progress, save_every_s: float) -> None:
        """Start the clock.

        Args:
            progress: How far earlier sittings came.
            save_every_s: Seconds between checkpoints.
        """
        now = time.perf_counter()
        self._started = now - progress.elapsed_s
        self._save_every_s = save_every_s
        self._saved = now
        self._lap = (progress.step, now)

    @property
    def elapsed_s(self) -> float:
        """Wall time so far."""
        return time.perf_counter() - self._started

    def is_save_due(self) -> bool:
        """Say whether a checkpoint should be written; a yes starts the wait for the next."""
        now = time.perf_counter()
        is_due = now - self._saved >= self._save_every_s
        if is_due:
            self._saved = now
        return is_due

    def lap(self, step: int) -> float:
        """Return the steps per second since the lap before.

        Args:
            step: Steps done.
        """
        last_step, last_time = self._lap
        self._lap = (step, time.perf_counter())
        return (step - last_step) / (self._lap[1] - last_time)

    def skip_lap(self) -> None:
        """Leave the time since the last lap out of the next one."""
        self._lap = (self._lap[0], time.perf_counter())
