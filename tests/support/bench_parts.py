"""Parts of tests of benchmarks: contenders, measurements and plans of the tiny model."""

from collections.abc import Callable
from typing import Any

import pytest

from kvpolicy.compat import has_meta_forwards
from kvpolicy.lab.bench.contenders.contender import Contender, Measurement
from kvpolicy.lab.bench.roofline import ModelSize
from kvpolicy.lab.bench.rounds.turns import Job, Turn, jobs_of
from kvpolicy.lab.bench.workload import Decode, Text
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.sweep_file import Series

WORK = Text(batch=2, prompt_min=3, prompt_max=5, new_tokens=5, seed=0)
STEP = Decode(batch=2, held=30, steps=3)
SIZE = ModelSize(weight_bytes=1000, num_weights=250, row_bytes=10, num_layers=2, query_size=32)
LAYERS, HEADS, HEAD_DIM, IN_FP32 = 2, 2, 8, 4  # of the tiny model
ROW = 2 * LAYERS * HEADS * HEAD_DIM * IN_FP32


needs_meta_forwards = pytest.mark.skipif(
    not has_meta_forwards(), reason="this transformers does not compute on the device meta"
)


def cell(stack: str, budget: int = 8, buffer: int = 4, **entries: Any) -> Cell:
    plan = Series(stack, {"stack": stack.split("+"), **entries})
    if stack == "skipkv":  # there is no tokenizer
        plan = Series(stack, {"stack": [{"policy": stack, "delimiters": [1, 2]}]})
    return build_cells([plan], num_layers=LAYERS, budgets=[budget], buffer=buffer)[0]


def cells(*stacks: str, budget: int = 8, buffer: int = 4) -> list[Cell]:
    return [cell(stack, budget, buffer) for stack in stacks]


def measurement(step_s: float | list[float], **changes: Any) -> Measurement:
    steps = step_s if isinstance(step_s, list) else [step_s] * 3
    plain: dict[str, Any] = {"kv_bytes": 1, "read_bytes": 0, "batch": 2}
    return Measurement(steps_s=tuple(steps), **(plain | changes))


def named(name: str, run: Callable[..., Measurement] | None = None, **fields: Any) -> Contender:
    run = run or (lambda work: measurement(1.0))
    return Contender(name, run, run, **fields)


def one_round(number: int, found: dict[str, Measurement], work: str = WORK.name) -> list[Turn]:
    return [Turn(number, (name, work), one) for name, one in found.items()]


def jobs_at(contenders: list[Contender], *works: Any) -> list[Job]:
    return jobs_of(contenders, works or [WORK])
