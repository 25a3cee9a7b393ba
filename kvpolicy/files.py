"""Atomic writes."""

import os
from contextlib import suppress
from pathlib import Path

from kvpolicy.errors import OutputError


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old content or the new one, never a part of it.

    Args:
        path: The file.
        content: Its new content; text is written as UTF-8.

    Raises:
        OutputError: It cannot be written; an existing file is unchanged.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        msg = f"{path} cannot be written: {error.strerror or error}; choose another place"
        raise OutputError(msg) from error
