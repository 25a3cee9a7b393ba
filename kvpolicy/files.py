"""Files of users: text, TOML and JSON are read with limits; writes are atomic.

Every file that somebody else may have written is read here, so that one that is missing, damaged,
nested too deeply or far too large is answered by one sentence that names it.
"""

import json
import os
import re
import secrets
import sys
import tomllib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import attrs

from kvpolicy.errors import KVPolicyError, OutputError, shown

if sys.platform != "win32":
    import fcntl

MAX_BYTES = 2**28  # of a file that is read as a whole, or of a line of JSON lines
MAX_TOML_BYTES = 2**20  # tomllib takes seconds for a MiB
MAX_NESTING = 100  # levels; reading and copying data calls functions level by level

_UNFINISHED = re.compile(r"\.kvpolicy-[0-9a-f]{8}\.new")


def path_of(value: object, what: str, *, error: type[KVPolicyError] = KVPolicyError) -> Path:
    """A path that a caller gave.

    Args:
        value: What was given.
        what: What it names, for the message.
        error: The class to raise.

    Raises:
        KVPolicyError: If it is neither a text nor a path.
    """
    try:
        return Path(value)  # type: ignore[arg-type]
    except TypeError as cause:
        msg = f"{what} was given as {shown(value)}; give its path as a text or a pathlib.Path"
        raise error(msg) from cause


def read_text(
    path: Path, name: str, *, most: int = MAX_BYTES, error: type[KVPolicyError] = KVPolicyError
) -> str:
    """Read a file of UTF-8 text; a byte order mark is left out.

    Args:
        path: The file.
        name: What it is, for messages, such as ``"plan 'a.toml'"``.
        most: Largest size, in bytes.
        error: Exception to raise.

    Raises:
        KVPolicyError: It cannot be read, is larger, or is not UTF-8.
    """
    return decode(read_bytes(path, name, most=most, error=error), name, error=error)


def read_bytes(
    path: Path, name: str, *, most: int = MAX_BYTES, error: type[KVPolicyError] = KVPolicyError
) -> bytes:
    """Read a file as a whole; arguments as for `read_text`.

    Raises:
        KVPolicyError: It cannot be read, or is larger.
    """
    with open_binary(path, name, error=error) as file:
        content = file.read(most + 1)  # also of a device without an end
    if len(content) > most:
        _refuse(f"{name} cannot be read: it is larger than {most >> 20} MiB", error)
    return content


@contextmanager
def open_binary(
    path: Path, name: str, *, error: type[KVPolicyError] = KVPolicyError
) -> Iterator[BinaryIO]:
    """Open a file for reading; arguments as for `read_text`.

    Raises:
        KVPolicyError: It cannot be opened, or read in the block.
    """
    try:
        file = path.open("rb")
    except OSError as caught:
        _refuse(f"{name} cannot be read: {caught.strerror or caught}", error, caught)
    except ValueError as caught:  # a path with a NUL or a lone surrogate
        _refuse(f"{name} cannot be read: {caught}", error, caught)
    with file:
        try:
            yield file
        except OSError as caught:
            _refuse(f"{name} cannot be read: {caught.strerror or caught}", error, caught)


def decode(content: bytes, name: str, *, error: type[KVPolicyError] = KVPolicyError) -> str:
    """UTF-8 text without its byte order mark.

    Args:
        content: What was read.
        name: What it is, for messages.
        error: Exception to raise.

    Raises:
        KVPolicyError: It is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as caught:
        _refuse(f"{name} is not UTF-8 text (byte {caught.start})", error, caught)


def read_toml(
    path: Path, name: str, *, error: type[KVPolicyError] = KVPolicyError
) -> dict[str, Any]:
    """Read a TOML file; arguments as for `read_text`.

    Raises:
        KVPolicyError: It cannot be read, is not TOML, or exceeds a limit.
    """
    text = read_text(path, name, most=MAX_TOML_BYTES, error=error)
    try:
        return parse_toml(text)
    except ValueError as caught:
        _refuse(f"{name} is not TOML: {caught}", error, caught)


def read_json(path: Path, name: str, *, error: type[KVPolicyError] = KVPolicyError) -> Any:
    """Read a JSON file; arguments as for `read_text`.

    Raises:
        KVPolicyError: It cannot be read, is not JSON, or exceeds a limit.
    """
    text = read_text(path, name, error=error)
    try:
        return parse_json(text)
    except ValueError as caught:
        _refuse(f"{name} is not JSON: {caught}", error, caught)


@attrs.frozen
class Line:
    """One line of a file.

    Attributes:
        number: Its number, counted from 1.
        begin: Where it begins, in bytes.
        text: The line without its end.
    """

    number: int
    begin: int
    text: str


def text_lines(
    file: BinaryIO,
    name: str,
    *,
    begin: int = 0,
    on_bytes: Callable[[bytes], object] = lambda _: None,
) -> Iterator[Line]:
    r"""Read the lines of a file of UTF-8 text that are not blank, one at a time.

    Lines end with ``\n`` or ``\r\n`` only: other separators, such as U+2028, may stand in JSON. A
    byte order mark is left out. The file may be larger than memory.

    Args:
        file: The file.
        name: What it is, for messages.
        begin: Where in it reading begins: its position.
        on_bytes: Receives the content, line by line, as it is.

    Raises:
        KVPolicyError: It is not UTF-8, or a line is larger than `MAX_BYTES`.
    """
    number = 0
    while content := file.readline(MAX_BYTES + 1):
        number += 1
        if len(content) > MAX_BYTES:
            where = name if number == 1 else f"line {number} of {name}"
            msg = f"{where} cannot be read: it is larger than {MAX_BYTES >> 20} MiB"
            raise KVPolicyError(msg)
        on_bytes(content)
        line = content.removeprefix(BOM_UTF8) if begin == 0 else content
        try:
            text = line.decode()
        except UnicodeDecodeError as caught:
            msg = f"{name} is not UTF-8 text (byte {begin + caught.start})"
            raise KVPolicyError(msg) from caught
        if text.strip():
            yield Line(number, begin, text.removesuffix("\n").removesuffix("\r"))
        begin += len(content)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Args:
        text: The text.

    Raises:
        ValueError: It is not TOML, or exceeds a limit; the message says which.
    """
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _plain(error) from None
    _check_nesting(found)
    return found


def parse_json(text: str | bytes) -> Any:
    """Parse one JSON value.

    ``NaN`` and ``Infinity`` are numbers, as Python's json writes them. A key that an object has
    twice is refused, as in TOML: readers differ in which of the values they take.

    Args:
        text: The text; bytes are UTF-8.

    Raises:
        ValueError: It is not JSON, or exceeds a limit; the message says which.
    """
    if len(text) > MAX_BYTES:
        msg = f"it is larger than {MAX_BYTES >> 20} MiB"
        raise ValueError(msg)
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        found = json.loads(decoded, object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        msg = f"it is not UTF-8 text (byte {error.start})"
        raise ValueError(msg) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _plain(error) from None
    if decoded.count("[") + decoded.count("{") > MAX_NESTING:  # else it cannot be nested deeper
        _check_nesting(found)
    return found


def atomic_write(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file so that readers see the old content or the new one, never a part of it.

    Args:
        path: The file.
        content: Its new content; text is written as UTF-8.
        private: As for `atomic_writer`.

    Raises:
        OutputError: As for `atomic_writer`.
    """
    # A lone surrogate has no UTF-8 form; in JSON its escape has the same value.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with atomic_writer(path, private=private) as file:
        file.write(data)


@contextmanager
def atomic_writer(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Open a file to be written in the block; readers see its old content until the block ends.

    The content is on the disk before it replaces the file, so that a power failure leaves one of
    the two. A symbolic link stays, and the file it names is replaced. What a killed process has
    left of such a write is removed by the first write of another one in that folder.

    Args:
        path: The file.
        private: Whether a new file is for this user only, whatever the umask; one that exists
            keeps its mode.

    Yields:
        The file that will replace it.

    Raises:
        OutputError: It cannot be written, or is no regular file; an existing file is unchanged.
    """
    temporary = None
    try:
        target = Path(os.path.realpath(path))  # `resolve` raises no OSError for a loop of links
        if target.exists() and not target.is_file():
            msg = f"{path} cannot be written: it is no regular file; choose another place"
            raise OutputError(msg)
        _tidy(target.parent)
        temporary, file = _new_file_beside(target, private=private)
        with file:
            if target.exists():
                with suppress(OSError):  # some file systems have no modes
                    temporary.chmod(target.stat().st_mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if sys.platform == "win32":
                file.close()  # an open file cannot be moved there
            os.replace(temporary, target)
        temporary = None
        _sync_folder(target.parent)
    except OSError as error:
        msg = f"{path} cannot be written: {error.strerror or error}; choose another place"
        raise OutputError(msg) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def is_unfinished_write(path: Path) -> bool:
    """Whether `atomic_write` writes, or has written, its content to this file first."""
    return _UNFINISHED.fullmatch(path.name) is not None


def remove_unfinished_writes(folder: Path) -> None:
    """Remove what killed processes have left of their atomic writes in a folder.

    Files that another process is writing now are locked, and stay. Where there are no locks, as on
    Windows and some network file systems, all stay.

    Args:
        folder: The folder; the first write of a process in it does this, too.
    """
    with suppress(OSError):  # of a folder that cannot be read or written, they stay
        for path in folder.iterdir():
            if is_unfinished_write(path) and path.is_file() and not path.is_symlink():
                _remove_if_unlocked(path)


def _remove_if_unlocked(path: Path) -> None:
    if sys.platform != "win32":
        with suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@cache
def _tidy(folder: Path) -> None:
    """Once in each folder: it may have many files."""
    remove_unfinished_writes(folder)


def _new_file_beside(target: Path, *, private: bool) -> tuple[Path, BinaryIO]:
    """A file with a new name, so that none of the user is overwritten; locked while it is open."""
    opener = _open_privately if private else None
    while True:
        path = target.with_name(f".kvpolicy-{secrets.token_hex(4)}.new")
        file = open(path, "xb", opener=opener)  # noqa: SIM115
        if sys.platform != "win32":
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # otherwise another process has tidied before it was locked
            return path, file
        file.close()


def _open_privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _refuse(msg: str, error: type[KVPolicyError], cause: Exception | None = None) -> NoReturn:
    raise error(msg) from cause


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        # Not by counting each: a server reads what anybody sends.
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        msg = f"an object has the key {twice!r:.60} twice"
        raise ValueError(msg)
    return found


def _check_nesting(data: Any) -> None:
    """Refuse data nested too deeply, such as the TOML ``a.a.a.a = 1``, which has no brackets."""
    level: list[Any] = [[data]]
    for _ in range(MAX_NESTING + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_NESTING} levels deep")


def _plain(error: ValueError) -> ValueError:
    """The reason of a parser; Python's own for long numbers names a function of Python."""
    reason = str(error)
    return ValueError("a number has too many digits" if "int_max_str_digits" in reason else reason)


def _sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk, where it can be opened: not on Windows."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
