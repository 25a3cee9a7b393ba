"""Showing how far a long command is: a live line on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import typer

from kvpolicy.cli.units import clock

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_EVERY_S = 10.0  # at least, between two lines in a log that say how far we are
_REDRAW_S = 0.1  # between two pictures on a terminal


class Progress(Protocol):
    """Shows how far a command is, on stderr."""

    def show(self, line: str, num_done: int) -> None:
        """Show the state of things in place of the last one shown.

        Args:
            line: What is being done.
            num_done: How much of the total is done.
        """

    def keep(self, line: str) -> None:
        """Show a line that stays."""


@contextmanager
def open_progress(total: int, num_done: int = 0) -> Iterator[Progress]:
    """Show progress in the way that suits where stderr goes.

    Args:
        total: How much there is to do.
        num_done: How much of it was done before.

    Yields:
        The display; it is gone when the block ends, the lines kept stay.
    """
    if not sys.stderr.isatty():
        yield _Lines(total, num_done)
        return
    # Imported here: rich is only needed where there is a terminal to draw on.
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    # No markup: what is being done may have brackets in its name.
    texts = ("{task.completed}/{task.total}", "{task.fields[left]}", "{task.description}")
    columns = [BarColumn(bar_width=24), *(TextColumn(text, markup=False) for text in texts)]
    console = Console(stderr=True, highlight=False)
    # Without a thread that draws: processes may be forked meanwhile, and would have its locks.
    with RichProgress(*columns, console=console, transient=True, auto_refresh=False) as live:
        yield _Live(live, total, num_done)


class Pace:
    """How fast things go, and when they will be over."""

    def __init__(self, total: int, num_done: int) -> None:
        """Begin now.

        Args:
            total: How much there is to do.
            num_done: How much of it was done before.
        """
        self._total, self._before = total, num_done
        self._begun = time.perf_counter()

    def describe(self, num_done: int) -> str:
        """Put it into words; nothing while there is nothing to go by.

        Args:
            num_done: How much of the total is done.
        """
        elapsed, fresh = time.perf_counter() - self._begun, num_done - self._before
        if not fresh:
            return ""
        each = elapsed / fresh
        pace = f"{1 / each:.1f}/s" if each < 10 else f"{each:.0f} s each"
        return f"{pace}, {clock(each * (self._total - num_done))} left"


class _Live:
    def __init__(self, live: "RichProgress", total: int, num_done: int) -> None:
        self._live = live
        self._pace = Pace(total, num_done)
        self._task = live.add_task("", total=total, completed=num_done, left="")
        self._drawn = 0.0

    def show(self, line: str, num_done: int) -> None:
        left, now = self._pace.describe(num_done), time.perf_counter()
        self._live.update(self._task, description=line, completed=num_done, left=left)
        if now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._live.refresh()

    def keep(self, line: str) -> None:
        self._live.console.print(line, markup=False, soft_wrap=True)


class _Lines:
    def __init__(self, total: int, num_done: int) -> None:
        self._total = total
        self._pace = Pace(total, num_done)
        self._last = time.perf_counter()

    def show(self, line: str, num_done: int) -> None:
        if time.perf_counter() - self._last >= _EVERY_S:
            pace = self._pace.describe(num_done)
            self.keep(f"{num_done}/{self._total} done{', ' if pace else ''}{pace}; {line}")

    def keep(self, line: str) -> None:
        self._last = time.perf_counter()
        typer.echo(line, err=True)
