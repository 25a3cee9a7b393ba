"""Worker processes: every job once, errors passed on, no process left."""

import multiprocessing
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from kvpolicy.engine.requests.results import Result, RunReport
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.executors.local import WorkerProcesses
from kvpolicy.lab.sweep.jobs import Event, Job, JobFinished, SampleMeasured
from kvpolicy.lab.tasks.task import EvalOutcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks its workers")

JOBS = [Job(f"cell {cell}", tuple(range(cell % 4))) for cell in range(11)]


def echo(job: Job) -> Iterator[Event]:
    for item in job.samples:
        result = Result(item, text=f"{job.cell} by {os.getpid()}")
        yield SampleMeasured(job, item, EvalOutcome(result))
    yield JobFinished(job, RunReport(), 0.0)


def summary(events: list[Event]) -> list[tuple[str, int | None]]:
    return [(n.job.cell, n.index if isinstance(n, SampleMeasured) else None) for n in events]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("num", [1, 2, 3, 20])
def test_workers_do_every_job_once_and_each_in_order(num: int) -> None:
    expected = summary([event for job in JOBS for event in echo(job)])
    with WorkerProcesses(echo, num) as pool:
        found = summary(list(pool.run_jobs(JOBS)))
        assert sorted(found, key=str) == sorted(expected, key=str)
        for job in JOBS:
            assert [n for n in found if n[0] == job.cell] == [
                n for n in expected if n[0] == job.cell
            ]
        assert summary(list(pool.run_jobs(JOBS[:2]))), "a pool can be used again"


def test_jobs_run_in_the_workers() -> None:
    with WorkerProcesses(echo, 2) as pool:
        texts = [
            n.outcome.result.text for n in pool.run_jobs(JOBS) if isinstance(n, SampleMeasured)
        ]
    workers = {str(text).split()[-1] for text in texts}
    assert str(os.getpid()) not in workers
    assert len(workers) <= 2


def test_no_jobs_bring_no_events() -> None:
    with WorkerProcesses(echo, 2) as pool:
        assert list(pool.run_jobs([])) == []


def test_a_user_error_is_raised_unchanged() -> None:
    def refuse(job: Job) -> Iterator[Event]:
        msg = f"{job.cell} cannot be"
        raise KVPolicyError(msg)
        yield

    with (
        WorkerProcesses(refuse, 2) as pool,
        pytest.raises(KVPolicyError, match="cell 0"),
    ):
        list(pool.run_jobs(JOBS[:1]))


def test_a_defect_has_its_traceback() -> None:
    def stumble(job: Job) -> Iterator[Event]:
        yield SampleMeasured(job, 0, EvalOutcome(Result(0)))
        raise ZeroDivisionError

    with (
        WorkerProcesses(stumble, 2) as pool,
        pytest.raises(RuntimeError, match=r"in stumble\n.*\nZeroDivisionError"),
    ):
        list(pool.run_jobs(JOBS))
    assert not multiprocessing.active_children()


def wait_for_workers() -> None:
    for worker in multiprocessing.active_children():
        worker.join()


def kill_workers() -> None:
    for worker in multiprocessing.active_children():
        worker.kill()
    wait_for_workers()


def test_a_killed_worker_is_reported() -> None:
    def vanish(job: Job) -> Iterator[Event]:
        os._exit(9)
        yield

    with WorkerProcesses(vanish, 2) as pool, pytest.raises(KVPolicyError, match="killed"):
        list(pool.run_jobs(JOBS))


def test_a_worker_killed_between_two_jobs_is_reported() -> None:
    def vanish(job: Job) -> Iterator[Event]:
        yield SampleMeasured(job, 0, EvalOutcome(Result(0)))
        yield JobFinished(job, RunReport(), 0.0)
        os._exit(9)

    with WorkerProcesses(vanish, 1) as pool:
        events = pool.run_jobs(JOBS)
        assert isinstance(next(events), SampleMeasured)
        # It finishes its first job and is gone before the second.
        wait_for_workers()
        with pytest.raises(KVPolicyError, match="killed"):
            list(events)


def test_a_worker_killed_before_its_first_job_is_reported() -> None:
    with WorkerProcesses(echo, 1) as pool:
        kill_workers()
        with pytest.raises(KVPolicyError, match="killed"):
            list(pool.run_jobs(JOBS))


def test_a_worker_killed_in_the_middle_of_a_message_is_reported() -> None:
    def talk(job: Job) -> Iterator[Event]:
        yield SampleMeasured(job, 0, EvalOutcome(Result(0)))
        yield SampleMeasured(job, 1, EvalOutcome(Result(1, text="x" * 50_000_000)))

    with WorkerProcesses(talk, 1) as pool:
        events = pool.run_jobs(JOBS[:1])
        assert isinstance(next(events), SampleMeasured)
        with socket.socket(fileno=os.dup(pool._pipes[0].fileno())) as pipe:
            # Its length takes four bytes; when what follows has begun, no pipe holds all of it.
            while len(pipe.recv(5, socket.MSG_PEEK)) < 5:
                pass
        kill_workers()
        with pytest.raises(KVPolicyError, match="killed"):
            list(events)


def test_workers_are_gone_when_the_block_ends() -> None:
    with WorkerProcesses(echo, 3):
        pids = [process.pid for process in multiprocessing.active_children()]
    assert len(pids) == 3
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_in_the_middle_of_a_job_with_the_process_that_forked_them(
    number: signal.Signals,
) -> None:
    # Each process that is alive holds the end to write.
    alive, held = os.pipe()
    begun, says = multiprocessing.Pipe(duplex=False)

    def work_on(job: Job) -> Iterator[Event]:
        says.send(job.cell)
        time.sleep(90)  # longer than the test waits
        yield

    def sweep() -> None:
        with WorkerProcesses(work_on, 2) as pool:
            list(pool.run_jobs(JOBS))

    process = multiprocessing.get_context("fork").Process(target=sweep)
    process.start()
    os.close(held)
    assert {begun.recv() for _ in range(2)} == {"cell 0", "cell 1"}
    os.kill(process.pid, number)
    process.join()
    ready, _, _ = select.select([alive], [], [], 60)
    assert ready, "a worker goes on"
    assert os.read(alive, 1) == b""
    os.close(alive)
