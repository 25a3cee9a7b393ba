"""Earlier names of `kvpolicy.entry_points`."""

from kvpolicy.entry_points import installed
from kvpolicy.entry_points import installed_file as bundled_file

__all__ = ["bundled_file", "bundled_names"]


def bundled_names(group: str) -> list[str]:
    """Names of a group, in alphabetical order."""
    return list(installed(group))
