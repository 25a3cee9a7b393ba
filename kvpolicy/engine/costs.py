"""What a run costs: seconds of prompts and decode steps, tokens, and waits between tokens."""

from collections import abc
from contextlib import contextmanager

from kvpolicy.engine.requests.results import RunReport
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Step
from kvpolicy.hooks.timing import PolicyTimings


class Costs:
    """Counts into the report of a run.

    Attributes:
        report: Totals so far.
    """

    def __init__(self, clock: abc.Callable[[], float], timings: PolicyTimings) -> None:
        """Take the clock, in seconds, and what measures the time of policies."""
        self.report = RunReport()
        self._clock, self._timings = clock, timings
        self._was_decode = False  # the last step
        self._num_chunks = 0

    @contextmanager
    def of_admission(self) -> abc.Iterator[None]:
        """Count the seconds of a block, in which slots take over what is stored, as prefill."""
        yield from self._counted((), is_decode=False)

    @contextmanager
    def of_eviction(self) -> abc.Iterator[None]:
        """Count the seconds of a block with the step before, after which rows are evicted in it."""
        yield from self._counted((), is_decode=self._was_decode)

    @contextmanager
    def of_step(self, step: Step) -> abc.Iterator[None]:
        """Count the seconds of a block in which a step is run."""
        self._was_decode = step.is_decode
        self._num_chunks += not step.is_decode
        yield from self._counted(step.sequences, is_decode=step.is_decode)

    @contextmanager
    def of_reading(self, step: Step) -> abc.Iterator[None]:
        """Count the seconds of a block in which the tokens of a step are read."""
        yield from self._counted(step.sequences, is_decode=step.is_decode)

    def _counted(self, sequences: abc.Iterable[Sequence], *, is_decode: bool) -> abc.Iterator[None]:
        start = self._clock()
        if is_decode:
            with self._timings.decoding():
                yield
            self.report.decode_s += self._clock() - start
            return
        yield
        elapsed = self._clock() - start
        self.report.prefill_s += elapsed
        for seq in sequences:
            seq.prefill_s += elapsed

    def note_tokens(self, sequences: abc.Iterable[Sequence], num_new: int) -> None:
        """Count new tokens of sequences, and how long they waited while prompts came in."""
        self.report.new_tokens += num_new
        now, num_chunks = self._clock(), self._num_chunks
        for seq in sequences:
            if seq.newest_after < num_chunks:
                if seq.newest_at:
                    gap = now - seq.newest_at
                    self.report.longest_gap_s = max(self.report.longest_gap_s, gap)
                seq.newest_after = num_chunks
            seq.newest_at = now
