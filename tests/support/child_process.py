"""The command line in a child process that can be killed, without importing torch again."""

import multiprocessing
import os
import resource
import signal
import sys
import warnings
from pathlib import Path

import attrs


@attrs.frozen
class Ended:
    """How a child ended: its status (negative: the signal that ended it) and its output.

    All processes it started belong to its session.
    """

    session: int
    status: int
    out: str
    err: str


def run_in_child(
    folder: Path,
    *words: object,
    most_bytes: int | None = None,
    stdout: Path | None = None,
    kill_after_s: float | None = None,
) -> Ended:
    """Run one command to its end.

    `most_bytes` limits the size of files, as on a full disk; `stdout` is a file for the results,
    which is not read then; after `kill_after_s` the child is killed as by `kill -9`.
    """
    out, err = stdout or folder / "child.out", folder / "child.err"
    for path in (out, err):
        if path.parent == folder:
            path.write_text("", encoding="utf-8")  # it may be killed before it prints
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=_child, args=([str(word) for word in words], out, err, most_bytes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's idle threads beside a fork
        child.start()
    child.join(kill_after_s)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode is not None
    assert child.pid is not None
    said = "" if stdout is not None else out.read_text("utf-8")
    return Ended(child.pid, child.exitcode, said, err.read_text("utf-8"))


def _child(words: list[str], out: Path, err: Path, most_bytes: int | None) -> None:
    from kvpolicy.cli.app import run

    os.setsid()  # a process group of its own, as a shell would give it
    # Tests that run in the background ignore interrupts, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    sys.stdout, sys.stderr = out.open("w", encoding="utf-8"), err.open("w", encoding="utf-8")
    status = run(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
