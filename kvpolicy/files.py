"""Files that appear whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from kvpolicy.errors import OutputError


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old content or the new one, never a part.

    Args:
        path: The file.
        content: Its new content; text is written as UTF-8.

    Raises:
        OutputError: It cannot be written; what was there before still is.
    """
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        msg = f"{path} cannot be written: {error.strerror or error}; choose another place"
        raise OutputError(msg) from error
