"""Append-only JSON lines that survive a kill in the middle of a line, and locks against writers."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvpolicy.errors import OutputError, ResultsError
from kvpolicy.files import open_binary, parse_json

_BLOCK = 2**20  # bytes that are searched at once for the end of a line


def as_stored(value: Mapping[str, Any]) -> dict[str, Any]:
    """What reading gives back after writing: JSON has lists only, and only texts as keys.

    Args:
        value: Plain data that JSON can hold.
    """
    stored: dict[str, Any] = json.loads(json.dumps(value))
    return stored


class JsonLinesWriter:
    """An append-only file of JSON objects, one per line, unbuffered.

    Attributes:
        path: The file.
        was_torn: Whether the last line was incomplete when the file was opened; it was removed.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and remove an incomplete last line.

        Args:
            path: The file; its folder exists.

        Raises:
            OutputError: The file cannot be opened.
        """
        self.path = path
        try:
            # Unbuffered: one system call per line, so that a kill loses one line at most.
            self._file = path.open("ab", buffering=0)
            complete = _length_of_complete_lines(path)
            self.was_torn = complete < self._file.tell()
            if self.was_torn:
                self._file.truncate(complete)
        except OSError as error:
            msg = f"{path} cannot be opened: {error.strerror}."
            raise OutputError(msg) from error

    def append(self, *records: dict[str, Any]) -> list[int]:
        """Add objects. When this returns, they survive the end of this process and of the machine.

        Args:
            records: Plain data that JSON can hold.

        Returns:
            Where each of them begins in the file, in bytes.

        Raises:
            OutputError: The file cannot be written, for example because the disk is full.
        """
        begins = []
        try:
            for record in records:
                begins.append(self._file.seek(0, os.SEEK_END))
                line = encode(record)
                while line:  # on an almost full disk, a write may take only a part
                    line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            msg = f"{self.path} cannot be written: {error.strerror}; earlier lines are intact."
            raise OutputError(msg) from error
        return begins

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonLines(JsonLinesWriter):
    """A `JsonLinesWriter` that knows what was in the file.

    Attributes:
        records: All objects that were in the file when it was opened, in order.
    """

    def __init__(self, path: Path) -> None:
        """Read what is in the file; then as for `JsonLinesWriter`.

        Raises:
            ResultsError: The file cannot be read, or a line is not a JSON object.
        """
        self.records = read_lines(path)
        super().__init__(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all objects of a JSON lines file, in order, without changing it.

    Args:
        path: The file; a missing file counts as empty.

    Returns:
        The objects. An incomplete last line is left out: it is being written, or its writer died.

    Raises:
        ResultsError: The file cannot be read, or a line is not a JSON object.
    """
    return [record for _, record in iter_lines(path)]


def iter_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the objects of a JSON lines file one by one; as for `read_lines`.

    Yields:
        Where the line of an object begins, in bytes, and the object.
    """
    if not path.exists():
        return
    begin = 0
    with open_binary(path, str(path), error=ResultsError) as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield begin, _parse(path, number, line)
            begin += len(line)


def lock_folder(folder: Path) -> FileLock:
    """Lock a folder against other writers, by a ``.lock`` file in it.

    The lock ends with its ``release`` or with this process. A forked child does not hold it:
    filelock closes the inherited descriptor in the child.

    Args:
        folder: An existing folder.

    Returns:
        The lock.

    Raises:
        OutputError: Another process holds it.
        OSError: The lock file cannot be written.
    """
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        msg = (
            f"output folder {folder} is being written by another kvpolicy process; "
            "wait for it, or choose another place with --output."
        )
        raise OutputError(msg) from error
    return lock


def _length_of_complete_lines(path: Path) -> int:
    """Bytes up to the last newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(end - _BLOCK, 0)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return 0


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line.removesuffix(b"\n"))
    except ValueError:
        record = None
    if not isinstance(record, dict):
        msg = (
            f"{path}, line {number}, is damaged: it is not a JSON object; delete that line to "
            "compute what it held again, or choose another place."
        )
        raise ResultsError(msg)
    return record


def encode(record: dict[str, Any]) -> bytes:
    """The line of an object, with its line feed."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form and must be escaped
        return json.dumps(record).encode() + b"\n"
