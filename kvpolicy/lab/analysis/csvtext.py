"""CSV that every reader takes apart as it was put together."""

import csv
from collections.abc import Iterable, Sequence
from typing import Any


def csv_text(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    r"""Rows as CSV, one line each, that end in ``\n``.

    Args:
        names: Of the columns.
        rows: Plain values in the order of the names; ``None`` is an empty field.
    """
    lines = _Lines()
    # A field is quoted for the letters of the line's end. Readers end a line at either of these.
    writer = csv.writer(lines, lineterminator="\r\n")
    writer.writerow(names)
    writer.writerows(rows)
    return "".join(lines.done)


class _Lines:
    """Takes what is written, a line at a time."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def write(self, line: str) -> None:
        self.done.append(line.removesuffix("\r\n") + "\n")
