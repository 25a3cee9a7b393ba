"""The command line of kvpolicy."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Exit status 0: done. 1: done, but some requests failed. 2: wrong input, reported in one
    sentence. 70: a defect of kvpolicy, with a traceback. 130: interrupted.

    Args:
        args: Arguments after the program name; those of this process by default.
    """
    _let_waiting_threads_sleep()
    try:
        from kvpolicy.cli.app import run

        status = run(sys.argv[1:] if args is None else list(args))
    except KeyboardInterrupt:  # while modules are imported; `run` answers those after that
        sys.stderr.write("kvpolicy: interrupted.\n")
        status = 130
    _exit(status)


def _let_waiting_threads_sleep() -> None:
    """Tell OpenMP, before torch loads it, to spin for microseconds where it waits, and then sleep.

    Its threads wait for each other many times in a decode step. Where something else runs on the
    cores, a thread that spins for milliseconds takes the time of the one that it waits for.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _exit(status: int) -> NoReturn:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A process of torchrun; `run` has flushed its output. The threads of its process group may
        # still be releasing tensors, for which they need the interpreter; one that asks for it
        # while the interpreter shuts down aborts the process ("terminate called without an active
        # exception").
        os._exit(status)
    sys.exit(status)
