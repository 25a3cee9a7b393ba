"""Files that packages bring along under a name, found by entry point.

An entry point of such a group gives a name to a package, whose folder holds the file
``NAME`` with the suffix of the group.
"""

from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path

from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks.discovery import nearest


def bundled_names(group: str) -> list[str]:
    """Names that installed packages give to files of a group, in alphabetical order."""
    return sorted(point.name for point in entry_points(group=group))


def bundled_file(group: str, name: str, *, suffix: str, what: str) -> Path:
    """Find the file that answers to a name.

    Args:
        group: Group of entry points.
        name: What the user typed.
        suffix: How files of the group end.
        what: What such a file is, for messages.

    Returns:
        Its path.

    Raises:
        KVPolicyError: No package brings such a file, or its package cannot be imported.
    """
    points = {point.name: point for point in entry_points(group=group)}
    if name not in points:
        msg = f"no {what} is named '{name}'{nearest(name, sorted(points))}"
        raise KVPolicyError(msg)
    try:
        folder = files(points[name].value)
    except (ImportError, TypeError) as error:
        msg = f"{what} '{name}' is broken: its package {points[name].value} cannot be imported"
        raise KVPolicyError(msg) from error
    return Path(str(folder / f"{name}{suffix}"))
