"""Programs in new processes that have imported the large libraries already.

A process that Python starts anew spends seconds on the import of torch and transformers. These are
forked from one that has imported libraries and nothing of kvpolicy: it has no threads and no state
of tests, and has computed nothing. (Tests of what is imported, or in which order, start Python.)
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import attrs

_LIBRARIES = [
    *("torch", "torch._dynamo", "transformers.modeling_utils", "transformers.models.auto"),
    *("fastapi", "prometheus_client", "uvicorn", "cattrs", "typer"),
]


@attrs.frozen
class Finished:
    """A program that has ended: its exit status and its output."""

    status: int
    out: str
    err: str


def start_fresh(
    code: str, *args: object, out: Path, err: Path, env: Mapping[str, str] | None = None
) -> ForkServerProcess:
    """Run a program like ``python -c CODE ARGS``.

    Args:
        code: The program.
        args: What it finds in `sys.argv`.
        out: File for its standard output.
        err: File for its standard error.
        env: Changes of the environment.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LIBRARIES)
    for path in (out, err):
        path.write_bytes(b"")
    argv = ["-c", *(str(arg) for arg in args)]
    environment = {**os.environ, **(env or {})}
    process = context.Process(
        target=_run, args=(code, argv, str(out), str(err), environment, str(Path.cwd()))
    )
    process.start()
    return process


def run_fresh(code: str, *args: object, folder: Path) -> Finished:
    """Run a program to its end; its output goes to files of a folder."""
    out, err = folder / "fresh.out", folder / "fresh.err"
    process = start_fresh(code, *args, out=out, err=err)
    process.join()
    assert process.exitcode is not None
    return Finished(process.exitcode, out.read_text("utf-8"), err.read_text("utf-8"))


def _run(code: str, argv: list[str], out: str, err: str, env: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = argv
    # A test run in the background has Ctrl-C ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    exec(code, {"__name__": "__main__"})
