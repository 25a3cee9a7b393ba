"""Where errors end: one sentence for a user's mistake, a traceback for a defect of ours."""

import os
import sys

import typer

from kvpolicy.cli.app import build
from kvpolicy.cli.interrupt import Interrupted, interrupts_are_heard
from kvpolicy.cli.output import cannot_write, say, sentence
from kvpolicy.errors import KVPolicyError

WRONG_INPUT = 2
INTERRUPTED = 130


def run(args: list[str]) -> int:
    """Run one command.

    Args:
        args: The words after ``kvpolicy``.

    Returns:
        The exit status.
    """
    try:
        with interrupts_are_heard():
            status = build().main(args, prog_name="kvpolicy", standalone_mode=False)
        sys.stdout.flush()
    except KVPolicyError as error:
        _stdout_is_broken()
        return _refuse(str(error))
    except (Interrupted, KeyboardInterrupt, typer.Abort) as interrupt:
        say(str(interrupt) or "interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) has seen enough.
        _close_stdout()
        return 0
    except OSError as error:
        if not _stdout_is_broken():
            raise
        return _refuse(str(cannot_write(error)))
    except Exception as error:
        # Typer's own mistakes are subclasses of a click class that has moved between its
        # releases; all of them can format their message.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(format_message())
            return 0
        return _refuse(format_message())
    if status == INTERRUPTED:  # Typer met Ctrl-C before a command did
        say("interrupted.")
    return status if isinstance(status, int) else 0


def _stdout_is_broken() -> bool:
    """Whether results cannot be written, for lack of space for example; nothing is left of them."""
    try:
        sys.stdout.flush()
    except OSError:
        _close_stdout()
        return True
    return False


def _close_stdout() -> None:
    """What is left in the buffer would be tried once more at exit, with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    """Say what is wrong as one sentence."""
    say(sentence(message))
    return WRONG_INPUT
