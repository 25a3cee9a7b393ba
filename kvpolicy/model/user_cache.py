"""The user's cache folder: what took long to fetch or to make, and can be had again.

``KVPOLICY_CACHE`` names it; otherwise it is ``kvpolicy`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
Nothing in it is ever changed: what is there is complete, and what is deleted is made again.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError

from kvpolicy.errors import ModelError

VARIABLE = "KVPOLICY_CACHE"


def cache_folder() -> Path:
    """The folder; it need not exist."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvpolicy"


def built_once(target: Path, what: str, build: Callable[[Path], None]) -> Path:
    """A folder that one process builds, while others wait for it.

    Whatever ends the building, it appears as a whole or not at all.

    Args:
        target: The folder.
        what: What it holds, for messages.
        build: Fills the empty folder that it is given.

    Returns:
        The folder.

    Raises:
        ModelError: It cannot be written.
    """
    if target.is_dir():
        return target
    with _writing(target, what):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            if not target.is_dir():
                partial = target.with_name(f".{target.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                try:
                    partial.mkdir()
                    build(partial)
                    for path in partial.iterdir():  # on the disk before it has its name
                        with path.open("rb+") as file:
                            os.fsync(file.fileno())
                    partial.rename(target)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    return target


def removed(target: Path) -> int:
    """Remove a folder, or what is left of it, while nobody builds it.

    Args:
        target: The folder.

    Returns:
        The bytes that it had; 0 if it was not there.

    Raises:
        ModelError: It cannot be removed.
    """
    found = size_of(target)
    with _writing(target, "it"):
        if target.is_dir():
            shutil.rmtree(target)
    return found


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed meanwhile
            found += path.stat().st_size if path.is_file() else 0
    return found


@contextmanager
def _writing(target: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        msg = (
            f"{what} cannot be kept in {target.parent}: {reason}; free some space there, or name "
            f"another folder by {VARIABLE}"
        )
        raise ModelError(msg) from error
