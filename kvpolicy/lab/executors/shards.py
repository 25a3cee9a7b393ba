"""Jobs in shards, for workers that may be lost: every item is told of once, whoever does it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil

import attrs

from kvpolicy.engine.results import RunReport
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.sweep.jobs import Job, JobDone, News

_SHARDS_PER_WORKER = 3  # so that the last ones end at about the same time
_MOST_LOSSES = 3


@attrs.define(eq=False)
class Shard:
    """Part of a job, done by one worker at a time.

    Attributes:
        job: The job it is part of.
        left: Places of its items that nobody has told of yet.
        losses: Workers in a row that were lost before they had told of any of its items.
    """

    job: Job
    left: list[int]
    losses: int = 0

    def as_job(self) -> Job:
        """What a worker is given: the items that are left."""
        return Job(self.job.cell, tuple(self.left))


class Ledger:
    """What is to be done, what is being done, and what has been told of."""

    def __init__(self, jobs: Sequence[Job], *, workers: int, slots: Callable[[Job], int]) -> None:
        """Open the ledger with jobs that are `cut`.

        Args:
            jobs: The jobs, in the order in which they are begun.
            workers: Workers that do them side by side.
            slots: Samples of a job decoded together.
        """
        self._waiting: deque[Shard] = deque()
        self._open: dict[Job, int] = {}
        self._begun: dict[Job, float] = {}
        for job, parts in zip(jobs, cut(jobs, workers=workers, slots=slots), strict=True):
            self._waiting.extend(Shard(job, list(part.items)) for part in parts)
            self._open[job] = len(parts)
        self._cut = {job for job, num in self._open.items() if num > 1}

    @property
    def num_waiting(self) -> int:
        """Shards that nobody works on."""
        return len(self._waiting)

    @property
    def is_done(self) -> bool:
        """Whether every item of every job has been told of."""
        return not self._open

    def take(self, wanted: Callable[[Job], bool]) -> Shard | None:
        """Give out the first shard that is wanted, or else the first.

        Args:
            wanted: Whether a worker would rather have shards of this job.

        Returns:
            A shard, or ``None`` if none is waiting.
        """
        if not self._waiting:
            return None
        shard = next((one for one in self._waiting if wanted(one.job)), self._waiting[0])
        self._waiting.remove(shard)
        self._begun.setdefault(shard.job, time.perf_counter())
        return shard

    def hear(self, shard: Shard, news: News) -> list[News]:
        """Take down what a worker tells of its shard.

        Args:
            shard: The shard.
            news: What happened, in terms of what `Shard.as_job` gave.

        Returns:
            What happened in terms of the whole job; nothing if it is known already.
        """
        if isinstance(news, JobDone):
            assert not shard.left, "a worker ends when it has told of every item"
            return self._close(shard, news.report)
        if news.item not in shard.left:
            return []
        shard.left.remove(news.item)
        shard.losses = 0
        return [attrs.evolve(news, job=shard.job)]

    def lose(self, shard: Shard) -> list[News]:
        """Put back what a lost worker has not told of.

        Args:
            shard: What it worked on.

        Returns:
            What happened to the job, if that was all of it.

        Raises:
            KVPolicyError: Too many workers in a row were lost with this shard.
        """
        self._cut.add(shard.job)
        if not shard.left:
            return self._close(shard, None)
        shard.losses += 1
        if shard.losses >= _MOST_LOSSES:
            msg = (
                f"{shard.losses} workers in a row were lost before they had finished any of the "
                f"same {len(shard.left)} samples, perhaps for lack of memory; what is done is "
                "kept: try again with fewer --slots, or more of a machine for each worker."
            )
            raise KVPolicyError(msg)
        self._waiting.appendleft(shard)
        return []

    def _close(self, shard: Shard, report: RunReport | None) -> list[News]:
        job = shard.job
        self._open[job] -= 1
        if self._open[job]:
            return []
        del self._open[job]
        elapsed_s = time.perf_counter() - self._begun[job]
        return [JobDone(job, None if job in self._cut else report, elapsed_s)]


def cut(jobs: Sequence[Job], *, workers: int, slots: Callable[[Job], int]) -> list[list[Job]]:
    """Cut jobs into shards.

    A job stays whole where there are enough others to keep all workers busy, since only a
    job that one worker does in one go can be timed, and where it is one batch.

    Args:
        jobs: The jobs.
        workers: Workers that do them side by side.
        slots: Samples of a job decoded together. A shard of a job that is cut has at least half
            as many: two halves done side by side end before a batch and the rest after it.

    Returns:
        The parts of each job, in order.
    """
    share = ceil(sum(len(job.items) for job in jobs) / (workers * _SHARDS_PER_WORKER))
    return [
        [Job(job.cell, part) for part in _parts(job.items, max(share, slots(job)))]
        if workers > 1
        else [job]
        for job in jobs
    ]


def _parts(items: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
    """Parts of at most so many items, all of nearly the same size, in order."""
    num = ceil(len(items) / most)
    ends = [round(len(items) * part / num) for part in range(num + 1)]
    return [items[begin:end] for begin, end in pairwise(ends)]
