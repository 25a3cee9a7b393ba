"""The folder of a benchmark: every turn is written as it ends, and the same command continues."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpolicy.errors import OutputError
from kvpolicy.lab.bench.rounds.turns import Turn
from kvpolicy.lab.store.jsonl import JsonLines, as_stored, lock_folder

TURNS, RESULT = "turns.jsonl", "bench.json"


class TurnFile:
    """The turns of a benchmark so far.

    Attributes:
        turns: Those that the file had when it was opened, and those that were added.
        passed: Checks that have passed.
    """

    def __init__(self, lines: JsonLines | None = None) -> None:
        records = [] if lines is None else lines.records[1:]
        self.turns = [Turn.from_dict(one) for one in records if "round" in one]
        self.passed = {one["passed"] for one in records if "passed" in one}
        self._lines = lines

    def batch_of(self, job: tuple[str, str]) -> int | None:
        """The batch at which a job was measured; ``None`` if it was not."""
        return next((one.measured.batch for one in self.turns if one.job == job), None)

    def add_passed(self, check: str) -> None:
        """Keep that a check has passed."""
        self.passed.add(check)
        if self._lines is not None:
            self._lines.append({"passed": check})

    def add(self, turn: Turn) -> None:
        """Keep a turn, in the file if there is one."""
        self.turns.append(turn)
        if self._lines is not None:
            self._lines.append(turn.to_dict())


@contextmanager
def open_turns(folder: Path | None, described: Mapping[str, Any]) -> Iterator[TurnFile]:
    """Open the file of turns in a folder, which is made if there is none.

    Args:
        folder: The folder; ``None``: turns are kept in memory only.
        described: What all turns have in common: model, machine, contenders and workloads.

    Raises:
        OutputError: The folder cannot be written, or has turns of another benchmark.
    """
    if folder is None:
        yield TurnFile()
        return
    make_folder(folder)
    lock = lock_folder(folder)
    lines = None
    try:
        lines = JsonLines(folder / TURNS)
        if not lines.records:
            lines.append(dict(described))
        if lines.records:
            _check_same(folder, lines.records[0], as_stored(described))
        yield TurnFile(lines)
    finally:
        if lines is not None:
            lines.close()
        lock.release()


def make_folder(folder: Path) -> None:
    """Make a folder if there is none, and check that files can be written there.

    Raises:
        OutputError: They cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_folder(folder).release()
    except OSError as error:
        msg = (
            f"output folder {folder} cannot be written: {error.strerror}; choose another one with "
            "--output."
        )
        raise OutputError(msg) from error


def _check_same(folder: Path, stored: dict[str, Any], described: dict[str, Any]) -> None:
    """Refuse to mix turns of two benchmarks."""
    for name in dict.fromkeys([*stored, *described]):
        if stored.get(name) != described.get(name):
            msg = (
                f"output folder {folder} has turns of another benchmark: its {name} is "
                f"{stored.get(name)!r:.120}, and here it is {described.get(name)!r:.120}; choose "
                "another folder with --output."
            )
            raise OutputError(msg)
