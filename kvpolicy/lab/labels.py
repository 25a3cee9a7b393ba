"""Short labels of series: what all have in common is said once."""

import re
from collections.abc import Sequence
from itertools import takewhile

_SHORTEST_PREFIX = 12  # a shorter common beginning is not worth a heading
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def short_labels(labels: Sequence[str]) -> tuple[str, list[str]]:
    """Shorten labels that are shown together.

    Knobs that labels of one name have in common are left out: ``SkipKV, tau=0.9, pair=max`` beside
    ``SkipKV, tau=0.8, pair=max`` becomes ``SkipKV, tau=0.9, ...``. A long beginning that all labels
    have in common is left out.

    Args:
        labels: The labels, all different.

    Returns:
        The beginning that was left out, which may be empty, and the short labels, all different.
        An ellipsis stands for what was left out.
    """
    shortened = _without_common_knobs(labels)
    prefix = _common_beginning(shortened)
    if len(set(shortened)) < len(set(labels)) or prefix in shortened:
        return "", list(labels)
    if not prefix:
        return "", shortened
    return prefix + _ELLIPSIS, [_ELLIPSIS + label.removeprefix(prefix) for label in shortened]


def _without_common_knobs(labels: Sequence[str]) -> list[str]:
    parts = [label.split(", ") for label in labels]
    found = []
    for name, *knobs in parts:
        same = [set(other[1:]) for other in parts if other[0] == name]
        common = set.intersection(*same) if len(same) > 1 else set()
        kept = [knob for knob in knobs if knob not in common]
        found.append(", ".join([name, *kept, *([_ELLIPSIS] if len(kept) < len(knobs) else [])]))
    return found


def _common_beginning(labels: Sequence[str]) -> str:
    """The longest one that ends behind a character which separates words or knobs."""
    if len(labels) < 2:
        return ""
    equal = takewhile(lambda letters: len(set(letters)) == 1, zip(*labels, strict=False))
    found = re.match(r".*[^\w.=]", "".join(letters[0] for letters in equal), re.DOTALL)
    prefix = found[0] if found else ""
    return prefix if len(prefix) >= _SHORTEST_PREFIX else ""
