"""A comparison by difficulty, or by whatever else the items of a task differ in."""

from collections.abc import Collection, Sequence
from typing import Any

import attrs

from kvpolicy.lab.analysis.table import Compared, Row, estimates_of, flat, tabulate, to_json
from kvpolicy.lab.store.records import Sample
from kvpolicy.lab.tasks.measures import Column


@attrs.frozen
class FacetRow:
    """The samples of one cell whose items are alike in one respect.

    Attributes:
        facet: The respect, such as ``depth``.
        value: Its value, such as 5.
        row: As for a whole cell; without what only a whole cell can tell, such as speed.
    """

    facet: str
    value: int | str
    row: Row


def break_down(
    cells: Sequence[Compared], samples: Collection[Sample], columns: Sequence[Column]
) -> list[FacetRow]:
    """Summarise the samples of every cell by each facet of their items.

    Args:
        cells: The cells, in the order of the table.
        samples: What is done.
        columns: What the task measures.

    Returns:
        Rows in the order of facets, values and cells. A facet's rows hold every sample that
        has the facet, once.
    """
    groups: dict[tuple[str, int | str], list[Sample]] = {}
    for sample in samples:
        for facet, value in sample.facets.items():
            groups.setdefault((facet, value), []).append(sample)
    ordered = sorted(groups, key=lambda key: (key[0], isinstance(key[1], str), key[1]))
    return [
        FacetRow(facet, value, row)
        for facet, value in ordered
        for row in tabulate(cells, groups[facet, value], {}, columns)
    ]


def facet_records(rows: Sequence[FacetRow]) -> list[dict[str, Any]]:
    """Rows as flat records: ``facet``, ``value``, then the columns of table.csv."""
    names = estimates_of([one.row for one in rows])
    records = to_json([one.row for one in rows])
    return [
        {"facet": one.facet, "value": one.value, **flat(record, names)}
        for one, record in zip(rows, records, strict=True)
    ]
