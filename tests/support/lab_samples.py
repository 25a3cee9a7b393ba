"""Cells and samples for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.lab.store.records import CellTiming, Sample
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.sweep_file import Series

CELLS = build_cells(
    [Series("full", {"stack": ["full"]}), Series("small", Series.from_stack("h2o").plan)],
    num_layers=2,
    budgets=[16],
    buffer=8,
)


def sample(cell: Cell, item: int, **changes: Any) -> Sample:
    """A sample of a cell; fields not given are zero or empty."""
    plain: dict[str, Any] = {
        "key": f"{cell.id}-{item}",
        "cell": cell.id,
        "group": cell.setting,
        "model": "m",
        "task": "t",
        "seed": 0,
        "series": cell.series,
        "budget": cell.budget,
        "buffer": cell.buffer,
        "plan": cell.digest,
        "item": item,
        "attempt": 0,
        "correct": False,
        "ungraded": None,
        "finish_reason": "stop",
        "error": None,
        "text": "",
        "facets": {},
        "values": {},
        "prompt_len": 5,
        "num_tokens": 1,
        "compactions": 0,
        "rows_evicted": 0,
        "peak_rows": 0,
        "peak_bytes": 0,
        "prefill_s": 0.0,
        "decode_s": 0.0,
    }
    return Sample(**(plain | changes))


@attrs.frozen
class MeasuredCell:
    """A cell with its samples, as tables read it."""

    series: str
    budget: float | None
    buffer: float | None
    digest: str
    samples: Sequence[Sample]
    timing: CellTiming | None


def measured(
    samples: Sequence[Sample],
    timings: Mapping[str, CellTiming] | None = None,
    cells: Sequence[Cell] = CELLS,
) -> list[MeasuredCell]:
    """Cells with those of the samples that are theirs."""
    return [
        MeasuredCell(
            series=cell.series,
            budget=cell.budget,
            buffer=cell.buffer,
            digest=cell.digest,
            samples=[one for one in samples if one.cell == cell.id],
            timing=(timings or {}).get(cell.id),
        )
        for cell in cells
    ]
