"""Shards of workers that come and go: every item once, and a report only of what is whole."""

import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.engine.results import Result, RunReport
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.executors.shards import Ledger, Shard, cut
from kvpolicy.lab.sweep.jobs import ItemDone, Job, JobDone, News
from kvpolicy.lab.sweep.recording import KeptRows
from kvpolicy.lab.tasks.measures import Outcome


def ledger_of(jobs: list[Job], workers: int, slots: int = 2) -> Ledger:
    return Ledger(jobs, workers=workers, slots=lambda _: slots)


def told(job: Job, item: int) -> ItemDone:
    return ItemDone(job, item, Outcome(Result(item)))


def ended(job: Job) -> JobDone:
    return JobDone(job, RunReport(new_tokens=7), 0.0)


def anything(_: Job) -> bool:
    return True


def take(ledger: Ledger) -> Shard:
    shard = ledger.take(anything)
    assert shard is not None
    return shard


@given(
    sizes=st.lists(st.integers(1, 9), max_size=5),
    workers=st.integers(1, 4),
    slots=st.integers(1, 4),
    losses=st.floats(0, 0.3),
    seed=st.integers(0, 2**16),
)
def test_whoever_is_lost_every_item_is_told_once_and_every_job_ends_once(
    sizes: list[int], workers: int, slots: int, losses: float, seed: int
) -> None:
    draw = random.Random(seed)
    # Numbers with gaps: the places that an interrupted run has left.
    jobs = [Job(f"c{c}", tuple(range(0, 2 * size, 2))) for c, size in enumerate(sizes)]
    ledger, news = ledger_of(jobs, workers, slots), list[News]()
    at_work: list[tuple[Shard, list[int]]] = []
    lost, pieces = set[str](), dict[str, int]()
    while not ledger.is_done:
        shard = ledger.take(anything) if len(at_work) < workers else None
        if shard is not None:
            todo = list(shard.as_job().items)
            draw.shuffle(todo)  # engines finish in an order of their own
            at_work.append((shard, todo))
            pieces[shard.job.cell] = pieces.get(shard.job.cell, 0) + 1
            continue
        number = draw.randrange(len(at_work))
        shard, todo = at_work[number]
        # One that has brought down two already is spared, or all would be given up.
        if draw.random() < losses and shard.losses < 2:
            lost.add(shard.job.cell)
            news += ledger.lose(shard)
            at_work.pop(number)
        elif todo:
            news += ledger.hear(shard, told(shard.as_job(), todo.pop()))
        else:
            news += ledger.hear(shard, ended(shard.as_job()))
            at_work.pop(number)
    for job in jobs:
        mine = [one for one in news if one.job == job]
        items = [one.item for one in mine if isinstance(one, ItemDone)]
        assert sorted(items) == list(job.items)
        assert isinstance(mine[-1], JobDone), "a job ends after its last item"
        assert sum(isinstance(one, JobDone) for one in mine) == 1
        in_one_go = pieces[job.cell] == 1 and job.cell not in lost
        assert (mine[-1].report is not None) == in_one_go
    assert {one.job for one in news} == set(jobs)


def test_what_a_worker_recorded_is_handed_on() -> None:
    job, kept = Job("c", (0, 1, 2, 3)), KeptRows(1, ["a"], [])
    ledger = ledger_of([job], workers=2)
    shard = take(ledger)
    place = shard.as_job().items[0]
    news = attrs.evolve(told(shard.as_job(), place), kept=kept)
    assert ledger.hear(shard, news) == [attrs.evolve(news, job=job)]


def test_a_single_worker_is_given_whole_jobs() -> None:
    jobs = [Job("a", (0, 1, 2, 3)), Job("b", (5,))]
    ledger = ledger_of(jobs, workers=1)
    assert [take(ledger).as_job() for _ in jobs] == jobs
    assert ledger.take(anything) is None


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    workers=st.integers(2, 6),
    slots=st.integers(1, 20),
)
def test_a_batch_is_not_cut_and_no_shard_is_less_than_half_a_batch(
    sizes: list[int], workers: int, slots: int
) -> None:
    jobs = [Job(f"c{c}", tuple(range(0, 2 * size, 2))) for c, size in enumerate(sizes)]
    for job, parts in zip(jobs, cut(jobs, workers=workers, slots=lambda _: slots), strict=True):
        assert tuple(item for part in parts for item in part.items) == job.items
        lengths = [len(part.items) for part in parts]
        assert max(lengths) - min(lengths) <= 1
        if len(job.items) <= slots:
            assert parts == [job]
        assert len(parts) == 1 or 2 * min(lengths) >= slots


def test_a_single_job_keeps_all_workers_busy() -> None:
    job = Job("a", tuple(range(20)))
    ledger = ledger_of([job], workers=4, slots=2)
    shards = [take(ledger).left for _ in range(ledger.num_waiting)]
    assert [item for shard in shards for item in shard] == list(job.items)
    assert len(shards) >= 4
    assert {len(shard) for shard in shards} == {2}
    ledger = ledger_of([job], workers=4, slots=8)
    assert [len(take(ledger).left) for _ in range(ledger.num_waiting)] == [7, 6, 7]


def test_many_jobs_stay_whole() -> None:
    jobs = [Job(f"c{c}", tuple(range(10))) for c in range(40)]
    ledger = ledger_of(jobs, workers=4)
    assert ledger.num_waiting == 40


def test_a_worker_goes_on_with_the_model_it_holds() -> None:
    jobs = [Job("a", (0,)), Job("b", (0,))]
    ledger = ledger_of(jobs, workers=1)
    shard = ledger.take(lambda job: job.cell == "b")
    assert shard is not None
    assert shard.job.cell == "b"
    assert take(ledger).job.cell == "a", "rather another than none"


def test_what_a_lost_worker_has_told_is_not_done_again() -> None:
    job = Job("a", (3, 4, 5))
    ledger = ledger_of([job], workers=1)
    shard = take(ledger)
    assert ledger.hear(shard, told(shard.as_job(), 4)) == [told(job, 4)]
    assert ledger.lose(shard) == []
    again = take(ledger)
    assert again.as_job().items == (3, 5)
    assert ledger.hear(again, told(again.as_job(), 4)) == [], "and would be told of once if it were"


def test_a_worker_that_is_lost_after_its_last_item_ends_its_job_without_a_report() -> None:
    job = Job("a", (0,))
    ledger = ledger_of([job], workers=1)
    shard = take(ledger)
    ledger.hear(shard, told(job, 0))
    (end,) = ledger.lose(shard)
    assert isinstance(end, JobDone)
    assert end.report is None
    assert ledger.is_done


def test_work_that_brings_down_every_worker_is_given_up() -> None:
    ledger = ledger_of([Job("a", (0, 1))], workers=1)
    for _ in range(2):
        assert ledger.lose(take(ledger)) == []
    with pytest.raises(KVPolicyError, match=r"3 workers in a row .* same 2 samples"):
        ledger.lose(take(ledger))


def test_losses_with_progress_in_between_are_borne_for_ever() -> None:
    job = Job("a", tuple(range(10)))
    ledger = ledger_of([job], workers=1)
    for item in range(9):
        shard = take(ledger)
        ledger.hear(shard, told(job, item))
        assert ledger.lose(shard) == []
