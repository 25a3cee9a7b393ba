"""Tables of stored runs: one row for each pooled cell, and for each value of a facet."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from kvpolicy.lab.analysis.facets import break_down
from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.analysis.storedcolumns import columns_of
from kvpolicy.lab.analysis.table import Row, estimates_of, flat, tabulate, to_json, write_csv
from kvpolicy.lab.tasks.measures import Column


@attrs.frozen
class PooledRow:
    """One cell, measured.

    Attributes:
        cell: The cell.
        row: What its samples come to; `Row.difference` is from the first cell of the same
            model and task.
        columns: What its task measures.
        facet: What the samples are alike in, if they are a part of the cell.
        value: Which value of it they have; empty if they are the whole cell.
    """

    cell: PooledCell
    row: Row
    columns: Sequence[Column]
    facet: str | None = None
    value: int | str = ""


def tabulate_pooled(cells: Iterable[PooledCell]) -> list[PooledRow]:
    """Summarise the samples of every cell that has any.

    Args:
        cells: The cells, in the order of the table.
    """
    found = []
    for block in _blocks(cells):
        samples = [sample for cell in block for sample in cell.samples]
        timings = {cell.id: cell.timing for cell in block if cell.timing is not None}
        columns = columns_of(block[0].group)
        by_plan = {cell.digest: cell for cell in block}
        for row in tabulate(block, samples, timings, columns):
            found.append(PooledRow(by_plan[row.plan], row, columns))
    return found


def break_down_pooled(cells: Iterable[PooledCell], facet: str) -> list[PooledRow]:
    """Summarise the samples of every cell by the values of one facet of their items.

    Args:
        cells: The cells, in the order of the table.
        facet: Its name; cells whose items do not have it have no row.
    """
    found = []
    for block in _blocks(cells):
        samples = [sample for cell in block for sample in cell.samples]
        columns = columns_of(block[0].group)
        by_plan = {cell.digest: cell for cell in block}
        for one in break_down(block, samples, columns):
            if one.facet == facet:
                cell = by_plan[one.row.plan]
                found.append(PooledRow(cell, one.row, columns, one.facet, one.value))
    return found


def to_plain(rows: Sequence[PooledRow]) -> list[dict[str, Any]]:
    """Rows as plain data: what they are of, then the fields of `Row`."""
    found = []
    for one in rows:
        cell, (row,) = one.cell, to_json([one.row])
        about = {
            "runs": list(cell.runs),
            "version": cell.version,
            "model": cell.group.model,
            "task": cell.group.task,
            "split": cell.group.split,
            "seeds": list(cell.seeds),
            "cells": list(cell.cells),
        }
        if one.facet is None:
            found.append({**about, **row, "num_expected": cell.num_expected})
        else:
            found.append({**about, "facet": one.facet, "facet_value": one.value, **row})
    return found


def to_csv(rows: Sequence[PooledRow]) -> str:
    """Rows as CSV: as `to_plain`, lists joined by spaces, estimates as three columns."""
    records, names = [], estimates_of([one.row for one in rows])
    for record in to_plain(rows):
        lists = {k: " ".join(map(str, v)) for k, v in record.items() if isinstance(v, list)}
        records.append(flat({**record, **lists}, names))
    return write_csv(records)


def _blocks(cells: Iterable[PooledCell]) -> Iterator[list[PooledCell]]:
    """Cells that were asked the same in the same way, together."""
    blocks: dict[object, list[PooledCell]] = {}
    for cell in cells:
        blocks.setdefault(cell.block, []).append(cell)
    return iter(blocks.values())
