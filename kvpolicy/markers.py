"""The decorators `hookspec` and `hookimpl`, importable without torch."""

import inspect
from collections.abc import Mapping
from typing import Any

import pluggy

PROJECT = "kvpolicy"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


def hook_options(attribute: object) -> Mapping[str, Any] | None:
    """What `hookimpl` was given for an attribute of a class; ``None`` if it is not decorated.

    No code of the attribute runs: properties and objects with a `__getattr__` are left alone.
    """
    holders = [attribute]
    if type(attribute) in (staticmethod, classmethod):
        holders.append(attribute.__func__)  # type: ignore[attr-defined]
    for holder in holders:
        options = inspect.getattr_static(holder, f"{PROJECT}_impl", None)
        if type(options) is dict:
            return options
    return None
