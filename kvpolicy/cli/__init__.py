"""The command line: every command in a file of its own, imported when it is asked for."""

import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Status 0: done. 1: done, but some requests failed. 2: wrong input, told in one sentence.
    130: interrupted.

    Args:
        args: Words of the command line; those of this process if not given.
    """
    from kvpolicy.cli.boundary import run

    sys.exit(run(sys.argv[1:] if args is None else list(args)))
