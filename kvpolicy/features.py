"""Features are files of ours that are imported where something needs them."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kvpolicy.errors import KVPolicyError


@cache
def is_there(module: str) -> bool:
    """Whether the file of a feature is there."""
    return find_spec(module) is not None


def feature(module: str, name: str, who: str) -> Any:
    """What a feature is made by.

    Args:
        module: Its module.
        name: The name of its class.
        who: Who needs it, the beginning of a sentence.

    Raises:
        KVPolicyError: Its file is not there.
    """
    if not is_there(module):
        msg = f"{who} need {module}, whose file is missing; install kvpolicy again"
        raise KVPolicyError(msg)
    return getattr(import_module(module), name)
