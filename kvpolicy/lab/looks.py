"""How a series looks in every figure: the colour of its policy, a marker and a line style.

A policy has the same colour in all plots and reports, whichever others are shown: the one that its
package registers, else one chosen by a hash of its name. An entry point of the group
``kvpolicy.colours`` points to a dict of policy names to names of `COLOURS`. Series of one colour
differ in marker and line style, and a marker is seen without colour vision, too.
"""

import hashlib
from collections.abc import Collection, Mapping
from itertools import count
from typing import Any

import attrs

from kvpolicy.entry_points import installed

GROUP = "kvpolicy.colours"


@attrs.frozen
class Colour:
    """A colour with a contrast of at least 3 to its background (WCAG 2).

    Attributes:
        light: On white, as ``"#rrggbb"``.
        dark: On a dark background.
    """

    light: str
    dark: str


INK = "ink"  # of the full cache: no colour of a policy that evicts

COLOURS = {
    INK: Colour("#333333", "#e7ebf0"),
    "blue": Colour("#0072b2", "#5aa9ec"),
    "vermilion": Colour("#d55e00", "#f5854a"),
    "green": Colour("#00875f", "#35c497"),
    "pink": Colour("#c8559b", "#f09ccb"),
    "amber": Colour("#b97a00", "#f0b43c"),
    "sky": Colour("#3897d3", "#9bd8f7"),
    "wine": Colour("#882255", "#d9709f"),
    "olive": Colour("#7c7c12", "#c9c95a"),
    "brown": Colour("#8c564b", "#c69585"),
    "indigo": Colour("#4a3fb0", "#a79cf5"),
    "grey": Colour("#767676", "#adb3ba"),
    "teal": Colour("#137f8c", "#4fc3cf"),
    "red": Colour("#c0182f", "#ff6f7d"),
}

# As matplotlib names them. Their number and that of line styles have no common divisor, so that
# 45 series of one colour look different.
MARKERS = ("o", "s", "D", "^", "v", "P", "*", "<", ">")
# Lengths of dashes and gaps, in line widths; a solid line has none.
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.6), (1, 1.4), (6, 1.6, 1, 1.6), (9, 2.4))


@attrs.frozen
class Look:
    """How a series looks.

    Attributes:
        colour: Name of one of `COLOURS`.
        marker: One of `MARKERS`.
        dashes: One of `DASHES`.
    """

    colour: str
    marker: str
    dashes: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the page."""
        return {
            "colour": self.colour,
            "marker": MARKERS.index(self.marker),
            "dashes": list(self.dashes),
        }


def looks_of(policies: Mapping[str, str]) -> dict[str, Look]:
    """Give each series a look of its own, with the colour of its policy.

    Args:
        policies: The policy of each series, see `policy_of`; an empty text for none.
    """
    registered = registered_colours()
    of_colour = {name: count(start=name == INK) for name in COLOURS}  # the full cache is dashed
    first_of: dict[str, int] = {}  # the first marker of a colour, another one for each
    looks = {}
    for series, policy in policies.items():
        colour = _colour(policy, registered)
        if colour not in first_of:
            first_of[colour] = _free(list(COLOURS).index(colour), first_of.values())
        nth = next(of_colour[colour])
        marker = MARKERS[(first_of[colour] + nth) % len(MARKERS)]
        looks[series] = Look(colour, marker, DASHES[nth % len(DASHES)])
    return looks


def policy_of(resolved: Mapping[str, Any]) -> str:
    """The policy that gives a resolved plan its colour; an empty text if there is none.

    Of the stack that most evicting layers have, it is the last policy with a registered colour,
    so that a mixture counts as itself, else the first one, which later ones wrap.

    Args:
        resolved: A resolved plan as plain data.
    """
    layers = resolved.get("layers") or []
    evicting = [layer for layer in layers if layer.get("budget") is not None]
    stacks = [
        tuple(str(one.get("policy", "")) for one in layer.get("stack") or [])
        for layer in evicting or layers
    ]
    stack = max(stacks, key=stacks.count, default=())
    registered = registered_colours()
    return next((name for name in reversed(stack) if name in registered), next(iter(stack), ""))


def registered_colours() -> dict[str, str]:
    """Colours that installed packages register; what is no colour is left out."""
    found: dict[str, str] = {}
    for point in installed(GROUP).values():
        try:
            entries = dict(point.load())
        except Exception:  # a broken package must not break every figure
            continue
        found |= {policy: name for policy, name in entries.items() if str(name) in COLOURS}
    return found


def _free(wanted: int, taken: Collection[int]) -> int:
    """The number of a marker: the one that is wanted, or the next that is not taken, if any."""
    turns = [(wanted + more) % len(MARKERS) for more in range(len(MARKERS))]
    return next((number for number in turns if number not in taken), turns[0])


def _colour(policy: str, registered: Mapping[str, str]) -> str:
    if policy in registered:
        return registered[policy]
    names = [name for name in COLOURS if name != INK]
    number = int.from_bytes(hashlib.sha256(policy.encode("utf-8", "replace")).digest()[:8])
    return names[number % len(names)] if policy else INK
