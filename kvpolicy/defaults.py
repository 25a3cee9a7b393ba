"""Defaults that an installed package sets: the model, task and sweep of commands that name none.

An entry point of the group ``kvpolicy.defaults``, named ``model``, ``task`` or ``sweep``, points
to a text: ``model = "package.module:DEFAULT_MODEL"``.
"""

from importlib.metadata import entry_points
from typing import Literal

GROUP = "kvpolicy.defaults"


def default_name(kind: Literal["model", "task", "sweep"]) -> str | None:
    """The name that an installed package makes the default; ``None`` if there is none.

    Args:
        kind: What is named.
    """
    for point in entry_points(group=GROUP, name=kind):
        try:
            return str(point.load())
        except Exception:
            continue
    return None
