"""Work on Ray: what workers take, how jobs are split, and what is run again after a loss."""

from collections import Counter
from collections.abc import Iterator
from math import ceil

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.executors.ray import (
    Work,
    WorkerResources,
    _Queue,
    _WorkerHandle,
    count_loss,
    shard_size,
    split_jobs,
)
from kvpolicy.lab.prompt_files.answering import Shard
from kvpolicy.lab.sweep.jobs import Job
from kvpolicy.prompts import Prompt

CPUS = [{"CPU": 8.0, "memory": 1e9}, {"CPU": 3.0}, {}]
GPUS = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 16.0}]


@pytest.mark.parametrize(
    ("resources", "nodes", "device", "gpus", "workers"),
    [
        (WorkerResources(), CPUS, None, 0, 11),
        (WorkerResources(cpus=4), CPUS, None, 0, 2),
        (WorkerResources(), GPUS, None, 1, 6),
        (WorkerResources(gpus=0.5), GPUS, None, 0.5, 10),
        (WorkerResources(gpus=2), GPUS, None, 2, 4),
        (WorkerResources(), GPUS, "cpu", 0, 26),
        (WorkerResources(), GPUS, "cuda", 1, 6),
        (WorkerResources(gpus=0), GPUS, None, 0, 26),
        (WorkerResources(workers=7), CPUS, None, 0, 7),
        (WorkerResources(workers=7, gpus=1), CPUS, None, 1, 7),
    ],
)
def test_as_many_workers_as_the_nodes_have_resources_for(
    resources: WorkerResources,
    nodes: list[dict[str, float]],
    device: str | None,
    gpus: float,
    workers: int,
) -> None:
    assert resources.of_each(nodes, device)["GPU"] == gpus
    assert resources.num_workers(nodes, device) == workers


@pytest.mark.parametrize(
    ("resources", "device", "takes"),
    [
        (WorkerResources(cpus=9), None, "9 CPU and 0 GPU"),
        (WorkerResources(), "cuda:0", "1 CPU and 1 GPU"),
    ],
)
def test_a_cluster_without_the_resources_is_refused(
    resources: WorkerResources, device: str | None, takes: str
) -> None:
    with pytest.raises(KVPolicyError) as caught:
        resources.num_workers(CPUS, device)
    assert "11 CPU and 0 GPU on 3 nodes" in str(caught.value)


@pytest.mark.parametrize("gpus", [1.5, 0.00001, -1.0, float("inf"), float("nan")])
def test_gpus_are_whole_or_a_fraction_of_one(gpus: float) -> None:
    with pytest.raises(KVPolicyError, match="--gpus-per-worker"):
        WorkerResources(gpus=gpus)


def jobs_of(sizes: list[int]) -> list[Job]:
    """Jobs with gaps between their samples, as an interrupted run leaves them."""
    return [Job(f"c{c}", tuple(range(0, 2 * size, 2))) for c, size in enumerate(sizes)]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    workers=st.integers(1, 6),
    slots=st.integers(1, 20),
)
def test_a_batch_stays_whole_and_no_part_is_less_than_half_a_batch(
    sizes: list[int], workers: int, slots: int
) -> None:
    jobs = jobs_of(sizes)
    parts = split_jobs(jobs, workers=workers, slots=lambda _: slots)
    for job in jobs:
        mine = [part for part in parts if part.cell == job.cell]
        assert tuple(item for part in mine for item in part.samples) == job.samples
        lengths = [len(part.samples) for part in mine]
        assert max(lengths) - min(lengths) <= 1
        if workers == 1 or len(job.samples) <= slots:
            assert mine == [job]
        assert len(mine) == 1 or 2 * min(lengths) >= slots


def test_a_single_job_keeps_all_workers_busy() -> None:
    job = Job("a", tuple(range(20)))
    parts = split_jobs([job], workers=4, slots=lambda _: 2)
    assert [len(part.samples) for part in parts] == [2] * 10
    parts = split_jobs([job], workers=4, slots=lambda _: 8)
    assert [len(part.samples) for part in parts] == [7, 6, 7]


def test_many_jobs_stay_whole() -> None:
    jobs = [Job(f"c{c}", tuple(range(10))) for c in range(40)]
    assert split_jobs(jobs, workers=4, slots=lambda _: 2) == jobs


def test_after_a_loss_the_samples_that_arrived_are_finished() -> None:
    worker = _WorkerHandle(actor=None, pending=None, job=Job("a", (3, 4, 5)), left=[3, 5])
    (event,) = worker.finished_part()
    assert (event.job, event.report) == (Job("a", (4,)), None)
    worker.left = [3, 4, 5]
    assert not list(worker.finished_part())


def test_work_that_kills_every_worker_is_given_up() -> None:
    losses, rest = Counter[Work](), Job("a", (0, 1))
    count_loss(rest, losses)
    count_loss(rest, losses)
    with pytest.raises(KVPolicyError, match="2 samples"):
        count_loss(rest, losses)


def test_losses_with_progress_in_between_are_survived() -> None:
    losses = Counter[Work]()
    for begin in range(9):
        count_loss(Job("a", tuple(range(begin, 10))), losses)
        count_loss(Job("a", tuple(range(begin, 10))), losses)


def shard(*numbers: int) -> Shard:
    return Shard(numbers, {number: Prompt(number, "x") for number in numbers})


def test_a_queue_makes_jobs_when_they_are_taken_and_gives_back_lost_ones_first() -> None:
    made = []

    def jobs() -> Iterator[Shard]:
        for number in range(3):
            made.append(number)
            yield shard(number)

    queue = _Queue(jobs())
    assert queue
    first = queue.take()
    assert (first, made) == (shard(0), [0])
    second = queue.take()
    queue.put_back(first)
    assert [queue.take() for _ in range(2)] == [first, shard(2)]
    assert not queue
    queue.put_back(second)
    assert queue.take() == second


@given(num=st.integers(1, 10**6), workers=st.integers(1, 200), slots=st.integers(1, 64))
def test_shards_fill_the_slots_and_fit_into_memory(num: int, workers: int, slots: int) -> None:
    size = shard_size(num, workers=workers, slots=slots)
    assert slots <= size <= 64 * slots
    if 3 * workers * slots <= num <= 3 * workers * 64 * slots:
        assert 2 * workers < ceil(num / size) <= 3 * workers


def test_the_rest_of_a_lost_shard_is_counted_without_its_prompts() -> None:
    losses = Counter[Work]()
    rest = attrs.evolve(shard(0, 1, 2), samples=(1, 2))
    count_loss(rest, losses)
    count_loss(attrs.evolve(shard(1, 2)), losses)
    with pytest.raises(KVPolicyError, match="2 prompts"):
        count_loss(rest, losses)
