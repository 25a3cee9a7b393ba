"""Contenders in turns: every round runs each at each work, and starts with another.

Speeds are compared within a round, so that changes of the machine's speed affect all equally.
"""

import gc
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

import attrs
import torch

from kvpolicy.lab.bench.contenders.contender import Contender, Measurement
from kvpolicy.lab.bench.roofline import Machine
from kvpolicy.lab.bench.timing import compiling_s
from kvpolicy.lab.bench.workload import Workload


@attrs.frozen
class Job:
    """One contender at one work."""

    contender: Contender
    work: Workload

    @property
    def name(self) -> tuple[str, str]:
        """The names of both, which no other job has."""
        return self.contender.name, self.work.name


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
        values = {field.name: record[field.name] for field in attrs.fields(Measurement)}
        for name in ("steps_s", "compacted"):
            values[name] = None if values[name] is None else tuple(values[name])
        values["machine"] = None if values["machine"] is None else Machine(**values["machine"])
        return cls(record["round"], (record["contender"], record["work"]), Measurement(**values))


def jobs_of(contenders: Sequence[Contender], works: Sequence[Workload]) -> list[Job]:
    """Every contender at every workload that it can do; those of one workload are adjacent."""
    return [Job(one, work) for work in works for one in contenders if one.supports(work)]


def measure(
    jobs: Sequence[Job], *, rounds: int, done: Collection[tuple[int, tuple[str, str]]] = ()
) -> Iterator[Turn]:
    """Run all jobs in turns.

    Args:
        jobs: The jobs.
        rounds: Number of rounds.
        done: Keys of turns that were measured before and are left out.

    Yields:
        Each turn as it ends.
    """
    for number in range(rounds):
        first = number % len(jobs)
        for job in [*jobs[first:], *jobs[:first]]:
            if (number, job.name) in done:
                continue
            gc.collect()  # the caches of the turn before
            yield Turn(number, job.name, _measure(job))


def _measure(job: Job) -> Measurement:
    """Run a job; note how long torch compiled, and the peak of a GPU's memory if one is in use."""
    if job.contender.is_outside:
        return job.contender.run(job.work)
    uses_gpu = torch.cuda.is_initialized()
    if uses_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before_s = compiling_s()
    measured = job.contender.run(job.work)
    peak = torch.cuda.max_memory_allocated() if uses_gpu else None
    return attrs.evolve(measured, device_bytes=peak, compile_s=compiling_s() - before_s)
