"""Output: results on stdout; messages, figures and progress on stderr.

Control characters in text of others are made visible here, so that no command can forget it.
"""

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from math import inf
from shutil import get_terminal_size
from time import monotonic
from typing import Any

from kvpolicy.errors import OutputError
from kvpolicy.text import visible, visible_json, visible_lines

_NARROWEST = 20  # characters of the text in a line
_WIDEST_TEXT = 100
_LONGEST_SENTENCE = 2000
LOG_EVERY_S = 10.0
_REDRAW_EVERY_S = 0.1


class StdoutClosed(Exception):  # noqa: N818 - not an error
    """The reader of stdout, such as ``head``, has closed it. typer would exit with status 1."""


def info(message: str) -> None:
    """Print a message that is not a result, to stderr.

    Args:
        message: One or more sentences; line breaks are shown as escapes.
    """
    info_text(f"kvpolicy: {visible(message)}")


def info_text(text: str) -> None:
    """Print a text of several lines that is not a result, to stderr.

    Args:
        text: The text, without its last line feed.
    """
    sys.stderr.write(visible_lines(text) + "\n")
    sys.stderr.flush()


def as_sentence(message: str) -> str:
    """A message without its capital letter and with a full stop; the middle of a long one is cut.

    Args:
        message: Such as ``"Invalid value"``.
    """
    begins_with_a_word = message[:1].isupper() and message[1:2].islower()
    message = shortened(message, _LONGEST_SENTENCE)
    sentence = message[:1].lower() + message[1:] if begins_with_a_word else message
    return sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."


def shortened(text: str, most: int) -> str:
    """A text without its middle if it has more than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def plain(text: str) -> str:
    """A text for help, which rich prints: without markup and control characters.

    Args:
        text: Lines of plain text, perhaps of another package.
    """
    from rich.markup import escape

    return escape(visible_lines(text))


def print_text(text: str) -> None:
    """Write a part of a result to stdout at once.

    Args:
        text: Lines, in which control characters are made visible; no line feed is added.

    Raises:
        OutputError: It cannot be written, because the disk is full for example.
    """
    _write(visible_lines(text))


def print_lines(lines: Iterable[str]) -> None:
    """Write lines with text of others in them to stdout.

    Args:
        lines: The lines; line breaks within one are shown as escapes.

    Raises:
        OutputError: It cannot be written.
    """
    _write("".join(f"{visible(line)}\n" for line in lines))


def print_exact(text: str) -> None:
    """Write text to stdout as it is, for programs that read it, such as what a model generated.

    Args:
        text: The text; on a terminal, control characters are made visible.

    Raises:
        OutputError: It cannot be written.
    """
    _write(visible_lines(text.replace("\r\n", "\n")) if sys.stdout.isatty() else text)


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Write a result as JSON to stdout.

    Args:
        value: Plain data.
        indent: Spaces per level; everything on one line by default.
    """
    _write(visible_json(json.dumps(value, ensure_ascii=False, indent=indent)) + "\n")


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise StdoutClosed from error
    except OSError as error:
        raise stdout_error(error) from error


def stdout_error(error: OSError) -> OutputError:
    """The error for results that cannot be written to stdout.

    Args:
        error: The error of the system.
    """
    reason = error.strerror or error
    return OutputError(f"standard output cannot be written: {reason}; free some space")


def terminal_width() -> int | None:
    """Characters in a line of the terminal; ``None`` if stdout is not a terminal."""
    return max(get_terminal_size().columns, _NARROWEST) if sys.stdout.isatty() else None


def print_entries(entries: Sequence[tuple[str, str, str]]) -> None:
    """Write named things to stdout, each with a summary beside its name and details below.

    Args:
        entries: Name, summary and details of each; details may be empty.

    Raises:
        OutputError: It cannot be written.
    """
    shown = [tuple(map(visible, entry)) for entry in entries]
    indent = 2 + max((len(name) for name, *_ in shown), default=0)
    width = max(min(get_terminal_size().columns, _WIDEST_TEXT), indent + _NARROWEST)
    for name, summary, details in shown:
        lines = _wrap(summary, indent, width) or [""]
        lines[0] = (name.ljust(indent) + lines[0].lstrip()).rstrip()
        print_lines(lines + _wrap(details, indent + 2, width))


def _wrap(text: str, indent: int, width: int) -> list[str]:
    blank = " " * indent
    return textwrap.wrap(
        text,
        width,
        initial_indent=blank,
        subsequent_indent=blank,
        break_on_hyphens=False,
        break_long_words=False,
    )


class Progress:
    """Progress of a long command on stderr: a live line on a terminal, else a line every 10 s.

    A context manager; the live line is removed when the block ends, logged lines stay.
    """

    def __init__(
        self, total: int, num_done: int = 0, *, clock: Callable[[], float] = monotonic
    ) -> None:
        """Begin.

        Args:
            total: Number of things to do.
            num_done: How many of them were done before.
            clock: Seconds that have passed.
        """
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._clock = clock
        self._begun_at, self._num_before = clock(), num_done
        self._console = Console(
            stderr=True, markup=False, highlight=False, emoji=False, get_time=clock
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
            disable=not self._is_live,
        )
        self._task = self._bar.add_task("", total=total, completed=num_done, pace="")
        # On a terminal the first update is shown at once.
        self._shown_at = -inf if self._is_live else self._clock()

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, description: str, num_done: int, *, share: float | None = None) -> None:
        """Show the current state.

        Args:
            description: What is being done.
            num_done: How many things are done.
            share: The share of the work since the beginning that is done, where it is better known
                than from the number of things: from what those that are not finished have come to.
        """
        description = visible(description)
        task = self._bar.tasks[0]
        pace = self._pace(num_done, task.total or 0, share)
        self._bar.update(self._task, description=description, completed=num_done, pace=pace)
        if self._clock() - self._shown_at < (_REDRAW_EVERY_S if self._is_live else LOG_EVERY_S):
            return
        self._shown_at = self._clock()
        if self._is_live:
            self._bar.refresh()
        else:
            pace = task.fields["pace"]
            self.log(f"{num_done}/{task.total} done{pace and ', '}{pace}; {description}")

    def _pace(self, num_done: int, total: float, share: float | None) -> str:
        """Speed and remaining time; empty while they are unknown.

        Both are from the beginning on: things that are done together may end at the same moment,
        and the time between the first and the last to end says nothing.
        """
        elapsed_s, num_new = self._clock() - self._begun_at, num_done - self._num_before
        if elapsed_s <= 0 or num_new <= 0:
            return ""
        share = share or num_new / max(total - self._num_before, num_new)
        speed = num_new / elapsed_s
        pace = f"{speed:.1f}/s" if speed > 0.1 else f"{1 / speed:.0f} s each"
        return f"{pace}, {timedelta(seconds=round(elapsed_s * (1 - share) / share))} left"

    def log(self, line: str) -> None:
        """Print a line that stays."""
        self._shown_at = self._clock()
        self._console.print(visible(line), soft_wrap=True)
