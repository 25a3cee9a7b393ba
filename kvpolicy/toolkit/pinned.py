"""Steering vectors named with a hash of what they hold.

A plan says which vector a policy uses, and results are kept by the hash of their plan. If a
plan held a mere path, vectors calibrated anew would pass for the old ones, and samples made
with those for samples of theirs.
"""

import hashlib

from kvpolicy.errors import SteeringError
from kvpolicy.toolkit.steering_vectors import SteeringVector, load_steering_vector, vector_file

_DIGITS = 8


def pin(reference: str) -> str:
    """Add the hash of a file of vectors to its name.

    Args:
        reference: A bundled name or a path, with or without ``#HASH`` behind it.

    Returns:
        The name or path with ``#HASH``.

    Raises:
        SteeringError: There is no such file, or it has another hash than the one given.
    """
    name, _, given = reference.partition("#")
    try:
        content = vector_file(name).read_bytes()
    except OSError as error:
        msg = (
            f"steering vector file '{name}' cannot be read: {error.strerror or error}; "
            "`kvpolicy steer calibrate` makes one"
        )
        raise SteeringError(msg) from error
    found = hashlib.sha256(content).hexdigest()[:_DIGITS]
    if given and given != found:
        msg = (
            f"steering vector file '{name}' has hash {found}, and the plan wants {given}; it was "
            "written again since: put the old one back, or leave '#' and the hash out"
        )
        raise SteeringError(msg)
    return f"{name}#{found}"


def load_pinned(reference: str, layer: int | None) -> SteeringVector:
    """Read the vector of one layer from a file named as `pin` names it."""
    return load_steering_vector(reference.partition("#")[0], layer)
