"""Where a comparison is run: what is told of a place is what is done there."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from lab_comparisons import prepared

from kvpolicy.lab.executors import executor as places
from kvpolicy.lab.executors.executor import Here, RayExecutor
from kvpolicy.lab.executors.ray import RayPool
from kvpolicy.lab.executors.shards import Ledger
from kvpolicy.lab.models import ModelCache
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.jobs import Job
from kvpolicy.lab.sweep.runner import jobs

forks = pytest.mark.skipif(sys.platform != "linux", reason="forks its workers")


@pytest.mark.parametrize(("workers", "threads"), [(1, 7), pytest.param(2, 1, marks=forks)])
def test_a_cell_is_tried_and_told_of_with_the_threads_that_it_is_run_with(
    workers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(places.torch, "set_num_threads", told.append)
    monkeypatch.setattr(places, "probe", lambda *_: told.append("tried"))
    comparison, here = prepared(), Here(ModelCache(), workers, threads=7)
    here.probe(comparison, comparison.cells[0], 1.0)
    assert told == [threads, "tried"]
    assert here.machine(comparison)["threads"] == threads


def on_ray(workers: int) -> RayExecutor:
    """A cluster of which nothing but its size is asked."""
    return RayExecutor(SimpleNamespace(workers=workers))  # type: ignore[arg-type]


def given_out(place: RayExecutor, comparison: Comparison) -> list[Job]:
    """What workers that are never lost are given."""
    pool = place.pool(comparison)
    assert isinstance(pool, RayPool)
    ledger = Ledger(jobs(comparison, set()), workers=place.cluster.workers, slots=pool._slots)
    shards = [ledger.take(lambda _: True) for _ in range(ledger.num_waiting)]
    return [shard.as_job() for shard in shards if shard is not None]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("n", [2, 12])
def test_on_ray_the_pieces_are_what_workers_are_given(workers: int, n: int) -> None:
    comparison, place = prepared(n=n), on_ray(workers)
    pieces = place.pieces(comparison, jobs(comparison, set()))
    assert pieces == given_out(place, comparison)
    assert (len(pieces) > len(comparison.cells)) == (workers > 1 and n > 2)


def test_here_no_cell_is_cut() -> None:
    comparison = prepared(n=12)
    whole = jobs(comparison, set())
    assert Here(ModelCache(), 2, threads=1).pieces(comparison, whole) == whole
