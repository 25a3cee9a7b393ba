"""Who runs the cells of a comparison: this process, or several with one thread each.

A small model leaves most of a processor idle when two threads share one matrix product;
two processes with a cell each are nearly twice as fast.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import attrs

from kvpolicy.engine.results import RunReport
from kvpolicy.lab.sweep.recording import KeptRows
from kvpolicy.lab.tasks.measures import Outcome


@attrs.frozen
class Job:
    """Part of a comparison.

    Attributes:
        cell: Id of the cell.
        items: Places of the items to be done in it, among those of its group.
    """

    cell: str
    items: tuple[int, ...]


@attrs.frozen
class ItemDone:
    """One item of a job is measured.

    Attributes:
        job: The job.
        item: Place of the item.
        outcome: What came of it.
        kept: What compactions kept of it, if that was to be recorded.
    """

    job: Job
    item: int
    outcome: Outcome
    kept: KeptRows | None = None


@attrs.frozen
class JobDone:
    """All items of a job are measured.

    Attributes:
        job: The job.
        report: What it cost, if one worker did it in one go: the costs of parts that were done
            side by side, or twice because a worker was lost, do not add up to a speed.
        elapsed_s: Seconds from its first item begun to its last one measured.
    """

    job: Job
    report: RunReport | None
    elapsed_s: float


News = ItemDone | JobDone
Serve = Callable[[Job], Iterator[News]]


class Pool(Protocol):
    """Something that can do jobs."""

    def serve(self, jobs: Sequence[Job]) -> Iterator[News]:
        """Do jobs, not necessarily in order, and tell what happens as it happens."""


@attrs.frozen
class ThisProcess:
    """Does one job after the other.

    Attributes:
        serve_job: Does one job.
    """

    serve_job: Serve

    def serve(self, jobs: Sequence[Job]) -> Iterator[News]:
        """Do jobs in order."""
        for job in jobs:
            yield from self.serve_job(job)
