"""What a shell offers where an installed name or a file is wanted."""

import re
from collections.abc import Callable
from glob import glob

from kvpolicy.entry_points import installed


def names_of(group: str, *files: str) -> Callable[[str], list[str]]:
    """A completion: names of an entry point group, and files.

    Names that commas or plus signs separate are completed one by one.

    Args:
        group: Such as ``"kvpolicy.policies"``.
        files: Endings of files that are offered, too, such as ``".toml"``, or ``"/"`` for folders.
    """

    def complete(incomplete: str) -> list[str]:
        before, last = re.fullmatch(r"(.*[,+])?(.*)", incomplete, re.DOTALL).groups("")  # type: ignore[union-attr]
        names = [before + name for name in installed(group) if name.startswith(last)]
        return names + [path for end in files for path in sorted(glob(f"{incomplete}*{end}"))]

    return complete
