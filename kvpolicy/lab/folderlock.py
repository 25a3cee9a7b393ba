"""One process at a time in a results folder."""

import os
from pathlib import Path

from kvpolicy.errors import OutputError

try:
    import fcntl
except ImportError:  # Windows has no flock; two runs in one folder are then the user's care
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """Holds a folder until released, or until the process ends in whatever way."""

    def __init__(self, folder: Path) -> None:
        """Take the folder.

        Args:
            folder: An existing folder.

        Raises:
            OutputError: Another process holds it.
        """
        self._file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            msg = (
                f"output folder {folder} is being written by another kvpolicy process; "
                "wait for it, or choose another folder with --output."
            )
            raise OutputError(msg) from error

    def release(self) -> None:
        """Let other processes have the folder."""
        os.close(self._file)
