"""A pool of forked processes, which share the model's memory and have one thread each.

They are forked when a model is loaded, with the results folder open: of what they inherit they use
none, and its lock they let go of (`kvpolicy.lab.store.jsonl`). When this process ends,
they find their pipe closed and end.
"""

import multiprocessing
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Self

import torch

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.sweep.jobs import Job, JobDone, News, Serve

# Elsewhere a process cannot be forked safely once torch is loaded.
CAN_FORK = sys.platform == "linux"


def stay_forkable() -> int:
    """Compute with one thread from now on; to be called before anything is computed.

    The pool of threads that torch makes at the first use of a second one does not survive
    forking.

    Returns:
        The number of threads until now, for a process that does not fork in the end.
    """
    before = torch.get_num_threads()
    if CAN_FORK:
        torch.set_num_threads(1)
    return before


class Processes:
    """Processes that do jobs side by side; use it in a ``with`` block."""

    def __init__(self, serve_job: Serve, num: int) -> None:
        """Fork.

        Args:
            serve_job: Does one job; the processes have it, and all it refers to, by forking.
            num: How many processes.
        """
        fork = multiprocessing.get_context("fork")
        pipes = [fork.Pipe() for _ in range(num)]
        ours = [pipe[0] for pipe in pipes]
        theirs = [pipe[1] for pipe in pipes]
        self._processes = [
            fork.Process(target=_work, args=(serve_job, mine, ours, theirs), daemon=True)
            for mine in theirs
        ]
        with warnings.catch_warnings():
            # Python warns of forking beside threads; torch has one idle thread at most here,
            # and the children use none of its locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            for process in self._processes:
                process.start()
        for pipe in theirs:
            pipe.close()
        self._pipes = ours

    def serve(self, jobs: Sequence[Job]) -> Iterator[News]:
        """Do jobs, each as soon as a process is free for it.

        Args:
            jobs: The jobs, in the order in which they are begun.

        Yields:
            What happens.

        Raises:
            KVPolicyError: A job failed, or a process was killed.
        """
        left = list(reversed(jobs))
        busy = set()
        for pipe in self._pipes[: len(left)]:
            _send(pipe, left.pop())
            busy.add(pipe)
        while busy:
            ready = [pipe for pipe in wait(list(busy)) if isinstance(pipe, Connection)]
            for pipe in ready:
                news = _receive(pipe)
                if isinstance(news, JobDone):
                    if left:
                        _send(pipe, left.pop())
                    else:
                        busy.remove(pipe)
                yield news

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _send(pipe: Connection, job: Job) -> None:
    with _somebody_is_there():
        pipe.send(job)


def _receive(pipe: Connection) -> News:
    with _somebody_is_there():
        news = pipe.recv()
    if isinstance(news, Exception):
        raise news
    return news


@contextmanager
def _somebody_is_there() -> Iterator[None]:
    """A worker may be gone between two messages (`EOFError`) or in the middle of one."""
    try:
        yield
    except (EOFError, OSError) as error:
        msg = (
            "a worker process was killed, perhaps for lack of memory; what is done is kept: "
            "try again with --workers 1 or fewer --slots."
        )
        raise KVPolicyError(msg) from error


def _work(
    serve_job: Serve, mine: Connection, ours: Sequence[Connection], theirs: Sequence[Connection]
) -> None:
    # Ctrl-C reaches the whole group; the parent ends us when it has put its things in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for pipe in [*ours, *(pipe for pipe in theirs if pipe is not mine)]:
        pipe.close()
    torch.set_num_threads(1)
    try:
        while True:
            _do(serve_job, mine.recv(), mine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone


def _do(serve_job: Serve, job: Job, pipe: Connection) -> None:
    try:
        for news in serve_job(job):
            pipe.send(news)
    except KVPolicyError as error:
        pipe.send(error)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception:
        pipe.send(RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))
