"""The executor of one machine: this process, or forked worker processes with one thread each.

A small model leaves most of a processor idle when two threads share one matrix product; two
processes with a cell each are nearly twice as fast.

Why not `concurrent.futures`: results stream from the middle of a job, a worker may be killed in
the middle of a message, and workers must end when this process is killed. A pipe for each worker
does all three; the shared queues of a process pool block in the last two.
"""

import multiprocessing
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import attrs
import torch

from kvpolicy.engine.reuse.store import PrefixStore
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.executors.parent import end_with_parent
from kvpolicy.lab.models import Lengths, ModelCache, ModelInfo
from kvpolicy.lab.prompt_files.answering import Answered, Answering, Longest, answers
from kvpolicy.lab.shared import MOST_BYTES
from kvpolicy.lab.store.session import describe_machine, num_cpus
from kvpolicy.lab.sweep.grid import Sweep
from kvpolicy.lab.sweep.jobs import Event, Job, JobFinished, run_job
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.prompts import Prompt

# On other systems a process cannot be forked safely once torch is loaded.
CAN_FORK = sys.platform == "linux"

_SMALL = 100_000_000  # parameters; a larger model keeps all cores busy by itself

RunJob = Callable[[Job], Iterator[Event]]


def limit_threads() -> int:
    """Compute with one thread from now on; call this before anything is computed.

    torch creates its thread pool when it first uses a second thread, and the pool does not
    survive forking.

    Returns:
        The number of threads before, for a process that will not fork.
    """
    before = torch.get_num_threads()
    if CAN_FORK:
        torch.set_num_threads(1)
    return before


@attrs.frozen
class LocalExecutor:
    """Runs jobs on this machine, model after model.

    Attributes:
        models: Loads the models.
        workers: Worker processes, if the user set a number.
        threads: Threads to compute with in this process, without worker processes.
        prefix_store: What the prompts of a file reuse; ``None``: nothing.
    """

    models: ModelCache
    workers: int | None
    threads: int
    prefix_store: PrefixStore | None = None

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Describe a model; see `ModelCache.describe`."""
        return self.models.describe(name)

    def bytes_per_sequence(self, name: str, plan: ResolvedPlan, lengths: Lengths) -> int:
        """What a plan allocates for a sequence; see `ModelCache.bytes_per_sequence`."""
        return self.models.bytes_per_sequence(name, plan, lengths)

    def default_length(self, name: str) -> int:
        """The most tokens to generate by default; see `ModelCache.default_length`."""
        return self.models.default_length(name)

    def num_workers(self, sweep: Sweep) -> int:
        """Return the number of worker processes; 1 means this process.

        Raises:
            KVPolicyError: More than one is wanted where that is not possible.
        """
        models = [setting.model for setting in sweep.settings]
        can = CAN_FORK and all(model.device == "cpu" for model in models)
        if self.workers is not None:
            if self.workers > 1 and not can:
                msg = f"{self.workers} workers need Linux and a model on the CPU; omit --workers."
                raise KVPolicyError(msg)
            return self.workers
        is_small = all(model.num_parameters < _SMALL for model in models)
        return min(num_cpus(), len(sweep.cells)) if can and is_small else 1

    def machine(self, sweep: Sweep) -> dict[str, Any]:
        """Describe this machine, with the threads of one worker."""
        return describe_machine(threads=self.threads if self.num_workers(sweep) == 1 else 1)

    def run_jobs(self, sweep: Sweep, jobs: Sequence[Job]) -> Iterator[Event]:
        """Run jobs. Jobs of one model must be adjacent, so that it is loaded once.

        Raises:
            KVPolicyError: A job failed, or a worker process was killed.
        """
        num = self.num_workers(sweep)
        for name, group in groupby(jobs, lambda job: _model_name(sweep, job)):
            yield from self._run_model(sweep, name, list(group), num)

    def answer(
        self, answering: Answering, prompts: Sequence[Prompt], left: Sequence[int]
    ) -> Generator[Answered, None, None]:
        """Answer prompts in this process; see `RayExecutor.answer`.

        What the prefix store holds in memory is in its folder afterwards, if it has one.
        """
        torch.set_num_threads(self.threads)
        few = attrs.evolve(answering, slots=min(answering.slots, len(left)))
        store = self.prefix_store
        engine = few.engine(self.models.open(answering.model.name), store)
        longest = Longest.of(few, engine, (prompts[number] for number in left))
        host, begin = socket.gethostname(), time.perf_counter()
        try:
            for ended in answers(few, engine, longest, ((n, prompts[n]) for n in left)):
                now = time.perf_counter()
                yield Answered(0, host, ended, now - begin)
                begin = now
        finally:
            if store is not None:
                store.flush()
        if store is not None:
            yield Answered(0, host, (), 0.0, store.stats)

    def _run_model(
        self, sweep: Sweep, name: str, jobs: Sequence[Job], num_workers: int
    ) -> Iterator[Event]:
        """Run the jobs of one model. Nothing but the model cache refers to the model afterwards."""
        loaded = self.models.open(name)
        loaded.shared.most_bytes = MOST_BYTES / num_workers
        run = partial(run_job, sweep, loaded=loaded)
        if num_workers > 1:
            with WorkerProcesses(run, num_workers) as workers:
                yield from workers.run_jobs(jobs)
            return
        torch.set_num_threads(self.threads)
        for job in jobs:
            yield from run(job)


def _model_name(sweep: Sweep, job: Job) -> str:
    return sweep.setting_of(sweep.cell(job.cell)).model.name


class WorkerProcesses:
    """Forked processes that run jobs side by side; a context manager.

    They share the model's memory with this process, and nothing may have been computed with more
    than one thread before they are forked. Of the open results folder they inherit nothing: its
    lock is released in them (`kvpolicy.lab.store.jsonl`). When this process ends, however it
    does, they end too, in the middle of a job.
    """

    def __init__(self, run_job: RunJob, num: int) -> None:
        """Fork the processes.

        Args:
            run_job: Runs one job; need not be picklable.
            num: Number of processes.
        """
        fork = multiprocessing.get_context("fork")
        pipes = [fork.Pipe() for _ in range(num)]
        self._pipes = [pipe[0] for pipe in pipes]
        worker_ends = [pipe[1] for pipe in pipes]
        self._processes = [
            fork.Process(target=_work, args=(run_job, end, self._pipes, worker_ends), daemon=True)
            for end in worker_ends
        ]
        with warnings.catch_warnings():
            # Python warns about forking a process with threads. torch has at most one idle
            # thread here, and the children use none of its locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            for process in self._processes:
                process.start()
        for end in worker_ends:
            end.close()

    def run_jobs(self, jobs: Sequence[Job]) -> Iterator[Event]:
        """Run jobs, each as soon as a process is free.

        Args:
            jobs: The jobs, in the order in which they start.

        Yields:
            Events.

        Raises:
            KVPolicyError: A job failed, or a process was killed.
        """
        waiting = list(reversed(jobs))
        busy = set()
        for pipe in self._pipes[: len(waiting)]:
            with _killed_worker_is_an_error():
                pipe.send(waiting.pop())
            busy.add(pipe)
        while busy:
            for pipe in [one for one in wait(list(busy)) if isinstance(one, Connection)]:
                with _killed_worker_is_an_error():
                    event = pipe.recv()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, JobFinished):
                    busy.remove(pipe)
                    if waiting:
                        with _killed_worker_is_an_error():
                            pipe.send(waiting.pop())
                        busy.add(pipe)
                yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


@contextmanager
def _killed_worker_is_an_error() -> Iterator[None]:
    """A worker may be gone between two messages (`EOFError`) or in the middle of one."""
    try:
        yield
    except (EOFError, OSError) as error:
        msg = (
            "a worker process was killed, perhaps for lack of memory; finished samples are kept: "
            "try again with --workers 1 or fewer --slots."
        )
        # Without its frames, which hold a view of the unsent bytes: Python 3.12 may crash when it
        # collects both together.
        raise KVPolicyError(msg) from error.with_traceback(None)


def _work(
    run_job: RunJob,
    pipe: Connection,
    parent_ends: Sequence[Connection],
    worker_ends: Sequence[Connection],
) -> None:
    # Ctrl-C reaches the whole process group; the parent ends the workers when it is ready.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    for end in [*parent_ends, *(end for end in worker_ends if end is not pipe)]:
        end.close()
    torch.set_num_threads(1)
    try:
        while True:
            job = pipe.recv()
            for event in _events(run_job, job):
                pipe.send(event)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone


def _events(run_job: RunJob, job: Job) -> Iterator[Event | Exception]:
    try:
        yield from run_job(job)
    except KVPolicyError as error:
        yield error
    except Exception:
        yield RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
