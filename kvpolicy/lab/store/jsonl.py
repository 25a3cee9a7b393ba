"""A file of JSON lines that survives being killed in the middle of one."""

import json
from pathlib import Path
from typing import Any

from kvpolicy.errors import OutputError


class JsonLines:
    """An append-only file of JSON objects, one per line, written through to the system.

    Attributes:
        path: The file.
        records: All objects that were in the file when it was opened, in order.
        was_torn: Whether the last line was incomplete when the file was opened; it has been
            cut off.
    """

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """Open the file, or create it, and cut off a last line that was never finished.

        Args:
            path: The file; its folder exists.
            new: Whether there must be no such file yet.

        Raises:
            OutputError: The file cannot be read or written, or a line is not a JSON object.
        """
        self.path = path
        try:
            content = path.read_bytes() if path.exists() and not new else b""
            whole = _whole(content)
            self.records = _records(path, whole)
            self.was_torn = len(whole) < len(content)
            # Unbuffered: one call of the system per line, so that a kill loses one line at most.
            self._file = path.open("xb" if new else "ab", buffering=0)
            if self.was_torn:
                self._file.truncate(len(whole))
        except FileExistsError as error:
            msg = f"{path} exists and is left as it is; choose another name, or delete it first."
            raise OutputError(msg) from error
        except OSError as error:
            msg = f"{path} cannot be opened: {error.strerror}."
            raise OutputError(msg) from error

    def append(self, record: dict[str, Any]) -> None:
        """Add one object; when this returns it survives the end of this process.

        Args:
            record: Plain data, ready for JSON.

        Raises:
            OutputError: The file cannot be written, because the disk is full for example.
        """
        try:
            line = _encode(record) + b"\n"
            while line:  # a disk that is almost full takes a part, and refuses only the next
                line = line[self._file.write(line) :]
        except OSError as error:
            msg = f"{self.path} cannot be written: {error.strerror}; what it held before is kept."
            raise OutputError(msg) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of such a file in order, read without touching it.

    Args:
        path: The file; none is like an empty one.

    Raises:
        OutputError: The file cannot be read, or a line is not a JSON object. A last line that
            was never finished is left out.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        msg = f"{path} cannot be opened: {error.strerror}."
        raise OutputError(msg) from error
    return _records(path, _whole(content))


def _whole(content: bytes) -> bytes:
    """Without a last line that was never finished."""
    return content[: content.rfind(b"\n") + 1]


def _records(path: Path, whole: bytes) -> list[dict[str, Any]]:
    return [_parse(path, i, line) for i, line in enumerate(whole.splitlines(), 1)]


def _encode(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a letter, which UTF-8 has no bytes for, is escaped
        return json.dumps(record).encode()


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        msg = (
            f"line {number} of {path} is not a JSON object; "
            "delete that line to compute its sample again, or choose another output folder."
        )
        raise OutputError(msg)
    return record
