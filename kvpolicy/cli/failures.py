"""What the command line answers to an exception: one sentence, or a traceback for a defect.

This is the only place where exceptions become output. A sentence is the answer to

* `KVPolicyError`, and to the usage errors of typer;
* an `OSError` of the system that names a file, or says what the machine has run out of;
* memory that cannot be had.

Anything else is a defect: its traceback is shown, with where to report it.
"""

import errno
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any, TextIO

import typer

from kvpolicy.cli.output import (
    StdoutClosed,
    as_sentence,
    info,
    info_text,
    shortened,
    stdout_error,
)
from kvpolicy.errors import KVPolicyError, is_out_of_memory

WRONG_INPUT = 2
DEFECT = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130

ISSUES = "https://github.com/kvpolicy/kvpolicy/issues"

_OUT_OF = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EIO,
    errno.EROFS,
}
# Usage errors that only the help of their command explains; other messages say what is valid.
_OF_A_COMMAND = ("NoSuchOption", "MissingParameter")
_PACKAGE = Path(__file__).parents[1]
_MOST_OF_PATH = 200  # characters
_NARROWEST, _WIDEST = 20, 1000  # columns


class Interrupted(Exception):  # noqa: N818 - not an error
    """The user pressed Ctrl-C; the message says what is kept and how to go on."""


def answer(error: BaseException) -> int:
    """Print what a user is told about an exception.

    Args:
        error: What a command raised.

    Returns:
        The exit status.
    """
    problem = _settle_stdout()
    if isinstance(error, (Interrupted, KeyboardInterrupt, typer.Abort)):
        info(str(error) or "interrupted.")
        return INTERRUPTED
    if isinstance(error, StdoutClosed):
        return 0
    # Usage errors derive from a click class that typer has moved between releases; all of them
    # have this method.
    format_message = getattr(error, "format_message", None)
    if type(error).__name__ == "NoArgsIsHelpError" and format_message is not None:
        typer.echo(format_message(), nl=False)  # rich has printed the help already
        return 0
    sentence = format_message() if format_message is not None else _sentence(error, problem)
    context = getattr(error, "ctx", None)
    if sentence is not None and context is not None and type(error).__name__ in _OF_A_COMMAND:
        sentence = f"{sentence.rstrip('.')}; see {context.command_path} --help"
    if sentence is not None and (given := _given(error)) is not None:
        sentence = f"{sentence.rstrip('.')}, and it is {given!r}"
    if sentence is not None:
        info(as_sentence(sentence))
        return WRONG_INPUT
    info_text("".join(traceback.format_exception(error)).rstrip("\n"))
    info(f"this is a defect of kvpolicy or of a plugin; report it with these lines: {ISSUES}")
    return DEFECT


@contextmanager
def standard_streams() -> Iterator[None]:
    """Make standard input, output and error usable, also those that the caller has closed.

    Characters that stdout cannot encode are escaped. Messages that stderr does not take, on a full
    disk for example, are dropped: nobody could read them, and the work goes on.
    """
    with ExitStack() as stack:
        _limit_columns(stack)
        if sys.stdin is None:
            stdin = stack.enter_context(open(os.devnull, encoding="utf-8"))
            stack.callback(setattr, sys, "stdin", sys.stdin)
            sys.stdin = stdin
        stdout = sys.stdout or stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        if hasattr(stdout, "reconfigure"):
            stdout.reconfigure(errors="backslashreplace")
        stack.enter_context(redirect_stdout(stdout))
        stderr = sys.stderr or stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(redirect_stderr(_Lenient(stderr)))
        yield


def _limit_columns(stack: ExitStack) -> None:
    """Keep COLUMNS within the widths in which help and tables can be drawn."""
    given = os.environ.get("COLUMNS", "")
    if not given.isdecimal():
        return
    columns = min(max(int(given[:9]), _NARROWEST), _WIDEST)
    if str(columns) != given:
        os.environ["COLUMNS"] = str(columns)
        stack.callback(os.environ.__setitem__, "COLUMNS", given)


def check_surroundings(args: Sequence[str]) -> None:
    """Check what every command needs: a working folder, and arguments that a system can pass.

    Args:
        args: Arguments of the command line; one with a NUL can come from Python only.

    Raises:
        KVPolicyError: The folder has been deleted; torch would end the process as it is loaded. Or
            an argument cannot be a path.
    """
    for arg in args:
        with suppress(UnicodeEncodeError):
            if b"\0" not in os.fsencode(arg):
                continue
        msg = f"the argument {arg!r:.60} has a NUL or half a character; leave it out"
        raise KVPolicyError(msg)
    try:
        Path.cwd()
    except OSError as error:
        msg = f"the working folder cannot be used: {error.strerror}; change to another one"
        raise KVPolicyError(msg) from error


class _Lenient:
    """A stream whose writes do not fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _given(error: BaseException) -> str | None:
    """The value of an option that typer refuses without saying what it was, as newer ones do."""
    errors = getattr(error.__context__, "errors", None)  # of pydantic, which checks it
    return shortened(str(errors()[0]["input"]), _MOST_OF_PATH) if callable(errors) else None


def _sentence(error: BaseException, stdout_problem: OSError | None) -> str | None:
    """What a user can correct; ``None`` for a defect."""
    if isinstance(error, KVPolicyError):
        return str(error)
    if is_out_of_memory(error):
        return (
            "there is not enough memory; give a smaller --budget, --buffer, --slots or "
            "--max-new-tokens, or a smaller model"
        )
    if not isinstance(error, OSError):
        return None
    if stdout_problem is not None:
        return str(stdout_error(stdout_problem))
    if error.errno is None:  # raised by a library, not by the system
        return None
    reason = error.strerror or os.strerror(error.errno)
    if error.filename is not None and not _is_ours(error.filename):
        return f"{_shown(error.filename)} cannot be used: {reason}; give another file or folder"
    if error.errno in _OUT_OF:
        return f"the system refuses to go on: {reason}; free some of it and try again"
    return None


def _is_ours(name: Any) -> bool:
    """Whether a file is a part of this package, which no user has named."""
    with suppress(TypeError, ValueError):
        return Path(os.fsdecode(name)).is_relative_to(_PACKAGE)
    return False


def _shown(name: Any) -> str:
    text = os.fsdecode(name) if isinstance(name, (bytes, os.PathLike)) else str(name)
    return shortened(text, _MOST_OF_PATH)


def _settle_stdout() -> OSError | None:
    """Write what is left in the buffer of stdout; returns why that is not possible."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        return error
    return None


def _discard(stream: IO[str]) -> None:
    """Python would write the rest of the buffer once more at exit, with a traceback."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
