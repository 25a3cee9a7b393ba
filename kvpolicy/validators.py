"""Validation of numbers given in Python, in plans and in sweep files."""

MAX_COUNT = 2**31 - 1  # more rows, tokens or layers than fit into any memory
MAX_SEED = 2**63 - 1


def positive_int(value: object, *, least: int = 1, most: int = MAX_COUNT) -> int:
    """Return an integer if it is in range; bools and floats are not integers.

    Args:
        value: What the caller gave.
        least: Smallest valid integer.
        most: Largest valid integer.

    Raises:
        TypeError: Anything else; the message names the value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{value!r:.60} is not a count; write a whole number"
        raise TypeError(msg)
    if not least <= value <= most:
        msg = f"{value} is out of range; write a whole number from {least} to {most:,}"
        raise TypeError(msg)
    return value
