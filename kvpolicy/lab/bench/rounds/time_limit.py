"""Measurements within a time: what would end later is not begun.

How long one takes is computed beforehand: bytes by the speed of the memory, products by that of the
processor, and launches. How much longer than that a contender takes is known once it was measured.
"""

import time
from collections.abc import Callable

import attrs

from kvpolicy.lab.bench.contenders.contender import Measurement
from kvpolicy.lab.bench.roofline import Machine, ModelSize, least_prefill_s, least_step_s
from kvpolicy.lab.bench.rounds.turns import Job
from kvpolicy.lab.bench.workload import Decode, Prefill, Text, Workload

# By how much a contender is slower than the arithmetic, before anything is known of it.
_FIRST_PACE = 3.0
# Operations that the host starts in a layer, how long it takes for one, and the tokens of a prompt
# that enter together.
_LAUNCHES, _LAUNCH_S, _CHUNK = 60, 1e-5, 128
# An engine is made, a step captured; and a cache is filled with random rows, one copy for each
# sequence and layer, at a share of the memory's speed.
_SETUP_S, _COPIES, _FILL_SHARE = 1.0, 8, 0.1
_WARM_UPS = 6  # steps that are not measured
_PREFILLS = 2  # of a prompt


@attrs.define
class TimeLimit:
    """Says which jobs would end too late.

    Attributes:
        ends: When the time is up.
        machine: What the machine can do.
        size: The model.
        clock: Tells the time in seconds.
        paces: How many times as long as the arithmetic a contender has taken, and seconds of
            compiling, by contender and kind of work.
    """

    ends: float
    machine: Machine
    size: ModelSize
    clock: Callable[[], float] = time.monotonic
    paces: dict[tuple[str, type[Workload]], tuple[float, float]] = attrs.field(factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return max(self.ends - self.clock(), 0.0)

    def learn(self, job: Job, measured: Measurement) -> None:
        """Note how long a job has taken: the next of its contender is expected to go so."""
        pace = measured.mean_step_s / self._least_s(job.at(measured.batch))
        self.paces[job.contender.name, type(job.work)] = pace, measured.compile_s

    def reason_against(self, job: Job) -> str | None:
        """Why a job is left out; ``None`` if there is time for it."""
        expected, left = self.expected_s(job), self.left_s
        return f"{expected:.0f} s expected, {left:.0f} s left" if expected > left else None

    def expected_s(self, job: Job) -> float:
        """Seconds that a job will take, and what comes before it."""
        known = self.paces.get((job.contender.name, type(job.work)))
        pace, compile_s = known or (_FIRST_PACE, 0.0)
        return self._setup_s(job) + compile_s + pace * self._num_units(job) * self._least_s(job)

    def _num_units(self, job: Job) -> int:
        """Steps or prefills in all."""
        work = job.work
        if isinstance(work, Prefill):
            return _PREFILLS
        if isinstance(work, Text):
            return work.new_tokens
        return job.contender.num_steps(work) + 2 * work.profiled + _WARM_UPS

    def _least_s(self, job: Job) -> float:
        """Seconds of a step or of a prefill, by arithmetic."""
        work = job.work
        launches_s = self.size.num_layers * _LAUNCHES * _LAUNCH_S
        if isinstance(work, Prefill):
            one = least_prefill_s(self.machine, self.size, work.num_tokens)
            return work.batch * one + -(-work.num_tokens // _CHUNK) * launches_s
        read = work.batch * self._rows(job) * self.size.row_bytes
        return least_step_s(self.machine, self.size, work.batch, read) + launches_s

    def _setup_s(self, job: Job) -> float:
        """Seconds before a step is measured, by arithmetic."""
        work = job.work
        if isinstance(work, Prefill):
            return 0.0
        if isinstance(work, Text):
            prefill = Prefill(work.prompt_max, work.batch)
            return _PREFILLS * self._least_s(attrs.evolve(job, work=prefill))
        if not job.contender.has_cache:
            return 0.0
        num_bytes = work.batch * self._rows(job) * self.size.row_bytes
        copies = work.batch * self.size.num_layers * _COPIES
        fill_s = num_bytes / (_FILL_SHARE * self.machine.bytes_per_s) + copies * _LAUNCH_S
        return _SETUP_S + fill_s

    def _rows(self, job: Job) -> float:
        """Rows that a sequence holds, at most."""
        work, contender = job.work, job.contender
        if not contender.has_cache or isinstance(work, Prefill):
            return 0
        longest = work.held if isinstance(work, Decode) else work.prompt_max + work.new_tokens
        return longest if contender.budget is None else min(longest, contender.budget)
