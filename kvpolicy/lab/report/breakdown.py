"""What the items of a group differ in, and what its cells come to where they are alike."""

from typing import Any

import attrs

from kvpolicy.lab.analysis.pooling import columns_of
from kvpolicy.lab.analysis.table import break_down
from kvpolicy.lab.report.gather import GroupView
from kvpolicy.lab.report.metrics import plain

_MOST_VALUES = 32  # a facet of more names items rather than telling how hard they are

Value = int | str
# Of each cell, by plan, and each facet: its first quantity for each value.
Breakdown = dict[str, dict[str, list[dict[str, Any] | None]]]


@attrs.frozen
class Facets:
    """What items differ in.

    Attributes:
        shown: Facets with their values, numbers before words.
        left_out: Facets of too many values for a table, with how many they have.
    """

    shown: dict[str, list[Value]]
    left_out: dict[str, int]


def facets_of(view: GroupView) -> Facets:
    """The facets of a group's items, by name."""
    found: dict[str, set[Value]] = {}
    for sample in view.samples:
        for name, value in sample.facets.items():
            found.setdefault(name, set()).add(value)
    facets = Facets({}, {})
    for name, values in sorted(found.items()):
        if len(values) > _MOST_VALUES:
            facets.left_out[name] = len(values)
        else:
            facets.shown[name] = sorted(values, key=lambda value: (isinstance(value, str), value))
    return facets


def breakdown(view: GroupView, facets: Facets) -> Breakdown:
    """What the cells of a group come to for each value of each facet that is shown."""
    columns = columns_of(view.group)[:1]
    found: Breakdown = {
        cell.digest: {name: [None] * len(values) for name, values in facets.shown.items()}
        for cell in view.cells
    }
    for row in break_down(view.cells, columns, facets=facets.shown):
        assert row.facet is not None
        place = facets.shown[row.facet].index(row.facet_value)
        estimate = plain(row.measured[columns[0].name])
        found[row.plan][row.facet][place] = {"n": row.n, "estimate": estimate}
    return found
