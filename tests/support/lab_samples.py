"""Cells and samples made up for tests."""

from typing import Any

from kvpolicy.lab.store.records import Sample
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.sweep_file import Series, series_of_stack

CELLS = build_cells(
    [Series("full", {"stack": ["full"]}), Series("small", series_of_stack("h2o").plan)],
    num_layers=2,
    budgets=[16],
    buffer=8,
)


def sample(cell: Cell, item: int, **changes: Any) -> Sample:
    """A sample of a cell; what is not said is nought."""
    plain: dict[str, Any] = {
        "key": f"{cell.id}-{item}",
        "cell": cell.id,
        "group": cell.group,
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
