"""Quantities as text: bytes, things that are counted, seconds; and bytes that are read."""

import re
from fractions import Fraction

from kvpolicy.errors import KVPolicyError

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(?:([kmgt])(i?))?b?", re.IGNORECASE | re.ASCII)


def format_bytes(num_bytes: float) -> str:
    """A number of bytes with a binary unit, such as ``1.5 MiB``.

    Args:
        num_bytes: The number.
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1000:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def exact_bytes(num_bytes: int) -> str:
    """A number of bytes as it would be typed, without rounding, such as ``256KiB``.

    Args:
        num_bytes: The number.
    """
    for base, letter in ((1024, "i"), (1000, "")):
        power = next((n for n in (3, 2, 1) if num_bytes and not num_bytes % base**n), 0)
        if power:
            return f"{num_bytes // base**power}{'KMG'[power - 1]}{letter}B"
    return f"{num_bytes}B"


def format_count(number: int, noun: str) -> str:
    """A number of things, such as ``1 cell`` or ``1,200 cells``.

    Args:
        number: The number.
        noun: What is counted, in the singular; its plural ends in s.
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_seconds(elapsed_s: float, compile_s: float = 0.0) -> str:
    """Seconds, such as ``12.3 s``, and how many of them went into compiling, if any.

    Args:
        elapsed_s: All seconds.
        compile_s: Those in which decode steps were compiled.
    """
    return f"{elapsed_s:.1f} s" + (f", {compile_s:.1f} s of them compiling" if compile_s else "")


def parse_bytes(option: str, text: str) -> int:
    """Parse a number of bytes: ``8GiB``, ``500MB``, ``1.5 TiB``, ``4096``.

    Args:
        option: Name of the option or key, for the message.
        text: What was given.

    Raises:
        KVPolicyError: It is not a number of bytes, or less than one.
    """
    found = _BYTES.fullmatch(text.strip())
    num_bytes = 0
    # "8G" could be either.
    if found is not None and not (found[2] and not text.strip().lower().endswith("b")):
        base = 1024 if found[3] else 1000
        num_bytes = int(Fraction(found[1]) * base ** _UNITS[(found[2] or "").lower()])
    if num_bytes < 1:
        msg = f"{option} was given {text!r:.60}; give bytes with a unit: 8GiB or 8GB."
        raise KVPolicyError(msg)
    return num_bytes
