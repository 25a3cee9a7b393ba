"""Files that appear whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old content or the new one, never a part.

    Args:
        path: The file.
        content: Its new content; text is written as UTF-8.
    """
    draft = path.with_name(path.name + ".new")
    draft.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(draft, path)
