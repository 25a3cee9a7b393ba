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
    """Exit status of a child (negative: the signal that ended it) and its output.

    All processes that it started belong to its process group.
    """

    group: int
    status: int
    out: str
    err: str


def run_in_child(
    folder: Path,
    *args: object,
    most_bytes: int | None = None,
    stdout: Path | None = None,
    kill_after_s: float | None = None,
) -> Ended:
    """Run one command until it exits.

    `most_bytes` limits the size of files, as on a full disk; `stdout` is a file for the output,
    which is then not read; after `kill_after_s` the child is killed as by `kill -9`.
    """
    out, err = stdout or folder / "child.out", folder / "child.err"
    for path in (out, err):
        if path.parent == folder:
            path.write_text("", encoding="utf-8")  # the child may be killed before it prints
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=_child, args=([str(word) for word in args], out, err, most_bytes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with torch's idle threads
        child.start()
    child.join(kill_after_s)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode is not None
    assert child.pid is not None
    output = "" if stdout is not None else out.read_text("utf-8")
    return Ended(child.pid, child.exitcode, output, err.read_text("utf-8"))


def _child(args: list[str], out: Path, err: Path, most_bytes: int | None) -> None:
    from kvpolicy.cli.app import run

    os.setpgrp()  # as a shell does; a new session would also have its own share of the processors
    # Background processes ignore interrupts, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    sys.stdout, sys.stderr = out.open("w", encoding="utf-8"), err.open("w", encoding="utf-8")
    status = run(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
