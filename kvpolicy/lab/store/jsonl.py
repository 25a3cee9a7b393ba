"""Append-only JSON lines that survive a kill in the middle of a line, and locks against writers."""

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvpolicy.errors import OutputError, ResultsError
from kvpolicy.files import parse_json


class JsonLines:
    """An append-only file of JSON objects, one per line, unbuffered.

    Attributes:
        path: The file.
        records: All objects that were in the file when it was opened, in order.
        was_torn: Whether the last line was incomplete when the file was opened; it was removed.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and remove an incomplete last line.

        Args:
            path: The file; its folder exists.

        Raises:
            OutputError: The file cannot be opened.
            ResultsError: The file cannot be read, or a line is not a JSON object.
        """
        self.path = path
        content = _read(path)
        complete = _complete_lines(content)
        self.records = _parse_lines(path, complete)
        self.was_torn = len(complete) < len(content)
        try:
            # Unbuffered: one system call per line, so that a kill loses one line at most.
            self._file = path.open("ab", buffering=0)
            if self.was_torn:
                self._file.truncate(len(complete))
        except OSError as error:
            msg = f"{path} cannot be opened: {error.strerror}."
            raise OutputError(msg) from error

    def append(self, *records: dict[str, Any]) -> None:
        """Add objects. When this returns, they survive the end of this process and of the machine.

        Args:
            records: Plain data that JSON can hold.

        Raises:
            OutputError: The file cannot be written, for example because the disk is full.
        """
        try:
            for record in records:
                line = _encode(record) + b"\n"
                while line:  # on an almost full disk, a write may take only a part
                    line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            msg = f"{self.path} cannot be written: {error.strerror}; earlier lines are intact."
            raise OutputError(msg) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all objects of a JSON lines file, in order, without changing it.

    Args:
        path: The file; a missing file counts as empty.

    Returns:
        The objects. An incomplete last line is left out: it is being written, or its writer died.

    Raises:
        ResultsError: The file cannot be read, or a line is not a JSON object.
    """
    return _parse_lines(path, _complete_lines(_read(path)))


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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}."
        raise ResultsError(msg) from error


def _complete_lines(content: bytes) -> bytes:
    """The content up to its last newline."""
    return content[: content.rfind(b"\n") + 1]


def _parse_lines(path: Path, complete: bytes) -> list[dict[str, Any]]:
    lines = complete.split(b"\n")[:-1]
    return [_parse(path, number, line) for number, line in enumerate(lines, 1)]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        msg = (
            f"{path}, line {number}, is damaged: it is not a JSON object; delete that line to "
            "compute its sample again, or choose another folder."
        )
        raise ResultsError(msg)
    return record


def _encode(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form and must be escaped
        return json.dumps(record).encode()
