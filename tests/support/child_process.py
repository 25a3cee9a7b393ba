"""The command line in a child process that can be killed, without importing torch again."""

import multiprocessing
import os
import resource
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class Kill:
    """The step at which a child is killed, as by ``kill -9``; the same at any speed.

    Attributes:
        step: Number of the step, counted from 1. A step creates, writes, renames or removes a file
            in the folder of the child.
        torn: Whether what that step has written lacks its last bytes.
    """

    step: int
    torn: bool = False


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
    kill: Kill | None = None,
) -> Ended:
    """Run one command until it exits.

    `most_bytes` limits the size of files, as on a full disk; `stdout` is a file for the output,
    which is then not read; `kill` says where the child is killed, if it comes that far.
    """
    out, err = stdout or folder / "child.out", folder / "child.err"
    for path in (out, err):
        if path.parent == folder:
            path.write_text("", encoding="utf-8")  # the child may be killed before it prints
    fork = multiprocessing.get_context("fork")
    words = [str(word) for word in args]
    child = fork.Process(target=_child, args=(words, out, err, most_bytes, kill))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with torch's idle threads
        child.start()
    child.join()
    assert child.exitcode is not None
    assert child.pid is not None
    output = "" if stdout is not None else out.read_text("utf-8")
    return Ended(child.pid, child.exitcode, output, err.read_text("utf-8"))


def _child(
    args: list[str], out: Path, err: Path, most_bytes: int | None, kill: Kill | None
) -> None:
    from kvpolicy.cli.app import run

    os.setpgrp()  # as a shell does; a new session would also have its own share of the processors
    # Background processes ignore interrupts, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    sys.stdout, sys.stderr = out.open("w", encoding="utf-8"), err.open("w", encoding="utf-8")
    if kill is not None:
        _kill_at(kill, err.parent)
    status = run(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _kill_at(kill: Kill, folder: Path) -> None:
    """Count the steps of this process, and kill it: before a step, or after a write."""
    victim, steps = os.getpid(), 0

    def count() -> bool:
        nonlocal steps
        steps += os.getpid() == victim  # processes that it forks do not count
        return steps >= kill.step and os.getpid() == victim

    def before(event: str, args: tuple[Any, ...]) -> None:
        creates = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
        if (creates or event in ("os.rename", "os.remove", "os.mkdir")) and (
            str(args[0]).startswith(str(folder)) and count()
        ):
            os.kill(victim, signal.SIGKILL)

    def written(file: int) -> None:
        if count():
            if kill.torn:
                with suppress(OSError):  # a folder
                    os.ftruncate(file, max(os.fstat(file).st_size - 5, 0))
            os.kill(victim, signal.SIGKILL)

    sys.addaudithook(before)
    os.fsync = written  # every write that counts ends with it
