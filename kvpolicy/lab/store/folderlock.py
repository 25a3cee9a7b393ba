"""One process at a time in a results folder, or at a file."""

import os
import weakref
from pathlib import Path

from kvpolicy.errors import OutputError

try:
    import fcntl
except ImportError:  # Windows has no flock; two runs in one folder are then the user's care
    fcntl = None  # type: ignore[assignment]


_held: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


class FileLock:
    """Holds a file until released, or until the process ends in whatever way."""

    def __init__(self, path: Path, *, said: str) -> None:
        """Take the file; it is made if there is none.

        Args:
            path: The file, in an existing folder.
            said: What messages call it.

        Raises:
            OutputError: Another process holds it.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            msg = (
                f"{said} is being written by another kvpolicy process; "
                "wait for it, or choose another place with --output."
            )
            raise OutputError(msg) from error
        _held.add(self)

    def release(self) -> None:
        """Let other processes have it."""
        _held.discard(self)
        if fcntl is not None:
            # Closing would not do while a process forked from this one has the file open, too.
            fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)

    def forget(self) -> None:
        """In a process forked from the one that holds the file: leave it that one's."""
        _held.discard(self)
        os.close(self._file)


class FolderLock(FileLock):
    """Holds a folder, by a file in it."""

    def __init__(self, folder: Path) -> None:
        """Take the folder.

        Args:
            folder: An existing folder.

        Raises:
            OutputError: Another process holds it.
        """
        super().__init__(folder / ".lock", said=f"output folder {folder}")


def _let_go() -> None:
    """A forked process has its parent's open files, and would hold them on its own."""
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
