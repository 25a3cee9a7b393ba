"""Output: results on stdout; messages, figures and progress on stderr."""

import json
import sys
from datetime import timedelta
from shutil import get_terminal_size
from time import monotonic
from typing import Any

import typer

from kvpolicy.errors import OutputError

_LOG_EVERY_S = 10.0
_REDRAW_EVERY_S = 0.1


def info(message: str) -> None:
    """Print a message that is not a result, to stderr.

    Args:
        message: One or more sentences.
    """
    typer.echo(f"kvpolicy: {message}", err=True)


def as_sentence(message: str) -> str:
    """A message without its capital letter and with a full stop.

    Args:
        message: Such as ``"Invalid value"``.
    """
    begins_with_a_word = message[:1].isupper() and message[1:2].islower()
    sentence = message[:1].lower() + message[1:] if begins_with_a_word else message
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."


def print_text(text: str) -> None:
    """Write a part of a result to stdout at once.

    Args:
        text: The text; no newline is added.

    Raises:
        OutputError: It cannot be written, because the disk is full for example.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except UnicodeEncodeError:
        # The terminal lacks some characters, or the text has lone surrogates: escape them.
        encoding = sys.stdout.encoding or "utf-8"
        print_text(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        raise  # the reader has closed the pipe, which is no error
    except OSError as error:
        raise stdout_error(error) from error


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Write a result as JSON to stdout.

    Args:
        value: Plain data.
        indent: Spaces per level; everything on one line by default.
    """
    print_text(json.dumps(value, ensure_ascii=False, indent=indent) + "\n")


def stdout_error(error: OSError) -> OutputError:
    """The error for results that cannot be written to stdout.

    Args:
        error: The error of the system.
    """
    reason = error.strerror or error
    return OutputError(f"standard output cannot be written: {reason}; free some space")


def terminal_width() -> int | None:
    """Characters in a line of the terminal; ``None`` if stdout is not a terminal."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


def format_bytes(num_bytes: float) -> str:
    """A number of bytes with a binary unit, such as ``1.5 MiB``.

    Args:
        num_bytes: The number.
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1000:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def format_count(number: int, noun: str) -> str:
    """A number of things, such as ``1 cell`` or ``1,200 cells``.

    Args:
        number: The number.
        noun: What is counted, in the singular; its plural ends in s.
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Progress:
    """Progress of a long command on stderr: a live line on a terminal, else a line every 10 s.

    A context manager; the live line is removed when the block ends, logged lines stay.
    """

    def __init__(self, total: int, num_done: int = 0) -> None:
        """Begin.

        Args:
            total: Number of things to do.
            num_done: How many of them were done before.
        """
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._console = Console(
            stderr=True, markup=False, highlight=False, emoji=False, get_time=monotonic
        )
        self._is_live = self._console.is_terminal
        # No refresh thread: worker processes may be forked while progress is shown, and would
        # inherit its locks. No markup: descriptions contain names with brackets.
        self._bar = RichProgress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}", markup=False),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
            auto_refresh=False,
            speed_estimate_period=float("inf"),
            disable=not self._is_live,
        )
        self._task = self._bar.add_task("", total=total, completed=num_done, pace="")
        self._shown_at = monotonic()

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, description: str, num_done: int) -> None:
        """Show the current state.

        Args:
            description: What is being done.
            num_done: How many things are done.
        """
        self._bar.update(self._task, description=description, completed=num_done)
        task = self._bar.tasks[0]
        self._bar.update(self._task, pace=_pace(task))
        if monotonic() - self._shown_at < (_REDRAW_EVERY_S if self._is_live else _LOG_EVERY_S):
            return
        self._shown_at = monotonic()
        if self._is_live:
            self._bar.refresh()
        else:
            pace = task.fields["pace"]
            self.log(f"{num_done}/{task.total} done{pace and ', '}{pace}; {description}")

    def log(self, line: str) -> None:
        """Print a line that stays."""
        self._shown_at = monotonic()
        self._console.print(line, soft_wrap=True)


def _pace(task: Any) -> str:
    """Speed and remaining time of a task of rich; empty while they are unknown."""
    if not task.speed or task.time_remaining is None:
        return ""
    speed = f"{task.speed:.1f}/s" if task.speed > 0.1 else f"{1 / task.speed:.0f} s each"
    return f"{speed}, {timedelta(seconds=int(task.time_remaining))} left"
