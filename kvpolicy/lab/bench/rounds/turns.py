"""Contenders in turns: every round runs each at each work, and starts with another.

Speeds are compared within a round, so that changes of the machine's speed affect all equally.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Self

import attrs
import torch

from kvpolicy.errors import KVPolicyError, error_summary, is_out_of_memory
from kvpolicy.lab.bench.contenders.contender import Contender, Measurement
from kvpolicy.lab.bench.operating_points.largest_batch import smaller_batch
from kvpolicy.lab.bench.profile import StepProfile
from kvpolicy.lab.bench.roofline import Machine
from kvpolicy.lab.bench.timing import compiling_s
from kvpolicy.lab.bench.workload import Workload


@attrs.frozen
class Job:
    """One contender at one work.

    Attributes:
        contender: Who is measured.
        work: At what.
        most_bytes: The most bytes of keys and values, if the work is at the largest batch that
            fits: one that turns out to be too large is made smaller.
    """

    contender: Contender
    work: Workload
    most_bytes: float | None = None

    @property
    def name(self) -> tuple[str, str]:
        """The names of both, which no other job has."""
        return self.contender.name, self.work.name

    def at(self, batch: int) -> Self:
        """The same with another batch."""
        return attrs.evolve(self, work=attrs.evolve(self.work, batch=batch))


@attrs.frozen
class Turn:
    """A job in one round.

    Attributes:
        round: Number of the round, from 0.
        job: The names of contender and work.
        measured: What was measured.
    """

    round: int
    job: tuple[str, str]
    measured: Measurement

    @property
    def key(self) -> tuple[int, tuple[str, str]]:
        """Round and job."""
        return self.round, self.job

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        contender, work = self.job
        measured = attrs.asdict(self.measured)
        return {"round": self.round, "contender": contender, "work": work, **measured}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """The turn that `to_dict` has written."""
        names = [field.name for field in attrs.fields(Measurement)]
        values = {name: record[name] for name in names if name in record}
        for name in ("steps_s", "compacted"):
            values[name] = None if values[name] is None else tuple(values[name])
        values["machine"] = None if values["machine"] is None else Machine(**values["machine"])
        profile = values["profile"]
        values["profile"] = None if profile is None else StepProfile.from_dict(profile)
        return cls(record["round"], (record["contender"], record["work"]), Measurement(**values))


@attrs.frozen
class Missing:
    """A job that was not measured in one round.

    Attributes:
        round: Number of the round, from 0.
        job: The names of contender and work.
        reason: Why not.
        failed: Whether it was tried and raised something else than that memory cannot be had.
    """

    round: int
    job: tuple[str, str]
    reason: str
    failed: bool


def jobs_of(contenders: Sequence[Contender], works: Sequence[Workload]) -> list[Job]:
    """Every contender at every workload that it can do; those of one workload are adjacent."""
    return [Job(one, work) for work in works for one in contenders if one.supports(work)]


def measure(
    jobs: Sequence[Job],
    *,
    rounds: int,
    done: Collection[tuple[int, tuple[str, str]]] = (),
    leave_out: Callable[[Job], str | None] = lambda _: None,
    goes_on: bool = False,
) -> Iterator[Turn | Missing]:
    """Run all jobs in turns.

    Args:
        jobs: The jobs.
        rounds: Number of rounds.
        done: Keys of turns that were measured before and are not again.
        leave_out: Says before a job why it is left out; ``None``: it is measured.
        goes_on: Whether other jobs are measured after one that raises.

    Yields:
        Each turn as it ends, and what was left out or has failed.
    """
    batches: dict[tuple[str, str], int] = {}
    for number in range(rounds):
        first = number % len(jobs)
        for job in [*jobs[first:], *jobs[:first]]:
            if job.name in batches:  # what fits is known from the round before
                job = job.at(batches[job.name])
            if (number, job.name) in done:
                continue
            if reason := leave_out(job):
                yield Missing(number, job.name, reason, failed=False)
                continue
            gc.collect()  # the caches of the turn before
            found: Turn | Missing
            try:
                found = Turn(number, job.name, _measure_fitting(job))
                batches[job.name] = found.measured.batch
            except Exception as error:  # whatever breaks on another device
                if not goes_on:
                    raise
                has_failed = not is_out_of_memory(error)
                found = Missing(number, job.name, error_summary(error), failed=has_failed)
            yield found


def _measure_fitting(job: Job) -> Measurement:
    """Run a job, at a smaller batch if the largest by arithmetic does not fit."""
    while True:
        kv_bytes = None
        try:
            measured = _measure(job)
        except (RuntimeError, MemoryError) as error:
            if job.most_bytes is None or job.work.batch == 1 or not is_out_of_memory(error):
                raise
        else:
            if job.most_bytes is None or measured.kv_bytes <= job.most_bytes:
                return measured
            kv_bytes = measured.kv_bytes
        batch = smaller_batch(job.work.batch, kv_bytes, job.most_bytes)
        if not batch:
            msg = f"{job.contender.name} takes more memory than the limit for one sequence"
            raise KVPolicyError(msg)
        job = job.at(batch)
        gc.collect()


def _measure(job: Job) -> Measurement:
    """Run a job; note how long torch compiled, and the peak of a GPU's memory if one is in use."""
    batch = job.work.batch
    if job.contender.is_outside:
        return attrs.evolve(job.contender.run(job.work), batch=batch)
    uses_gpu = torch.cuda.is_initialized()
    if uses_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before_s = compiling_s()
    measured = job.contender.run(job.work)
    peak = torch.cuda.max_memory_allocated() if uses_gpu else None
    compile_s = compiling_s() - before_s
    return attrs.evolve(measured, device_bytes=peak, compile_s=compile_s, batch=batch)
