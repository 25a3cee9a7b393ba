"""Cells and samples for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.store.records import CellTiming, EvalSettingRecord, Sample
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.sweep_file import Series

CELLS = build_cells(
    [Series("full", {"stack": ["full"]}), Series("small", Series.from_stack("h2o").plan)],
    num_layers=2,
    budgets=[16],
    buffer=8,
)
SETTING = EvalSettingRecord(
    group="g",
    model="m",
    model_fingerprint="",
    device="cpu",
    dtype="float32",
    task="t",
    seed=0,
    split="test",
    n=1,
    attempts=1,
    prompt_hash="",
    sampling="greedy",
    temperature=0.0,
    top_p=1.0,
    max_new_tokens=100,
    slots=1,
    measure="answers",
    columns=(),
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


def measured(
    samples: Sequence[Sample], timings: Mapping[str, CellTiming] | None = None
) -> list[PooledCell]:
    """Each of `CELLS` with those of the samples that are its own."""
    timings = timings or {}
    return [
        PooledCell(
            record=cell.record,
            group=SETTING,
            block=None,
            version="0.1.0",
            cells=(cell.id,),
            groups=(SETTING.group,),
            runs=("run",),
            seeds=(0,),
            samples=tuple(one for one in samples if one.cell == cell.id),
            items={},
            timings=(timings[cell.id],) if cell.id in timings else (),
            num_expected=len(samples),
        )
        for cell in CELLS
    ]
