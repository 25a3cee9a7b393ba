"""The command line of kvpolicy."""

import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Exit status 0: done. 1: done, but some requests failed. 2: wrong input, reported in one
    sentence. 70: a defect of kvpolicy, with a traceback. 130: interrupted.

    Args:
        args: Arguments after the program name; those of this process by default.
    """
    from kvpolicy.cli.app import run

    sys.exit(run(sys.argv[1:] if args is None else list(args)))
