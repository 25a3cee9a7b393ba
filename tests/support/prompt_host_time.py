"""What the host takes for a layer of a chunk of a prompt, where kernels cost what launches cost.

    python tests/support/prompt_host_time.py
    python tests/support/prompt_host_time.py --plans full,h2o --json prompts.json

The time is that of a thread on a CPU, of a chunk of few tokens in 36 layers that compute next to
nothing: fused operators, attention and compactions are allocations. A launch takes longer than
these. Once with the model's own operators, once with fused ones, and once where the chunk is
replayed from a graph, as those in the middle of a prompt are. How many kernels there are is counted
by ``kvpolicy bench --launches``.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvpolicy import Engine, Plan, Request
from kvpolicy.engine.engine import Run
from kvpolicy.lab.bench.models import SHAPES, random_model
from kvpolicy.model.chunk_graphs import ChunkGraphs
from kvpolicy.model.fused.operators import ADD_NORM, GATE, NORM, ROTATE
from kvpolicy.model.fused.step import Output
from kvpolicy.model.graphs import Graph

PLANS = ["full", "streaming", "snapkv", "rkv", "h2o"]
CHUNK, NUM_CHUNKS = 16, 40


class Stub:
    """Moves rows: one kernel on a GPU."""

    @staticmethod
    def compact(slab: Tensor, *_: Any, **__: Any) -> None:
        """Change a slab in one operator."""
        slab.add_(0)


def _zeros(*alike: Tensor) -> Any:
    made = tuple(map(torch.zeros_like, alike))
    return made if len(made) > 1 else made[0]


ALLOCATIONS = {
    NORM: lambda states, *_: _zeros(states),
    ADD_NORM: lambda states, added, *_: _zeros(states, added),
    ROTATE: lambda query, key, *_: _zeros(query, key),
    GATE: lambda gate, _: torch.zeros(gate.shape, dtype=gate.dtype),
}


def attended(queries: Tensor, *_: Any) -> Tensor:
    """Attention by weights, in the order of memory of its kernels."""
    return torch.zeros_like(queries.transpose(1, 2).contiguous()).transpose(1, 2)


def captured(run: Callable[[], Output]) -> Graph:
    """A graph whose replay is one operator: the launch of a graph."""
    output = run()
    return Graph(lambda: output[0].add_(0), output)


@contextmanager
def as_on_a_gpu(*, fuses: bool) -> Iterator[None]:
    """Run prompts as on a GPU in a block, with the model's own operators or with fused ones."""
    replaced: dict[str, Any] = {
        "kvpolicy.engine.runner.Runner._fuses": lambda *_: fuses,
        "kvpolicy.model.fused_prompts.are_close": lambda *_: True,
        "kvpolicy.model.fused_prompts.kernels_on": lambda _: ALLOCATIONS,
        "kvpolicy.cache.layouts.staged.backend_for": lambda *_: Stub,
        "kvpolicy.cache.layouts.even.backend_for": lambda *_: Stub,
        "kvpolicy.attention.fused._lower_right": lambda queries, *_: queries.new_zeros(
            queries.shape
        ),
        "kvpolicy.attention.eager.on_gpu": lambda _: True,
        "kvpolicy.attention.by_weights.ATTEND_BY_WEIGHTS": attended,
    }
    with ExitStack() as patches:
        for name, one in replaced.items():
            patches.enter_context(patch(name, one))
        yield


def begun(plan: str) -> Run:
    """A run in the middle of its prompt."""
    shape, positions = SHAPES["host"], CHUNK * (NUM_CHUNKS + 1)
    model = random_model(shape, 0, max_positions=positions, dtype="bfloat16")
    bounds = {} if plan == "full" else {"budget": CHUNK, "buffer": CHUNK // 8}
    staged = {} if plan == "full" else {"prefill_buffer": CHUNK}
    engine = Engine(model, plan=Plan.uniform(plan, **bounds, **staged), slots=1, chunk=CHUNK)
    run = engine.generate([Request([1] * (CHUNK * NUM_CHUNKS), 2, stop_ids=())])
    run.evictor.defers, run.evictor.call_bytes = True, 512 << 20
    for _ in range(3):
        run.step()
    return run


def host_ms(plan: str, *, fuses: bool = True, replays: bool = False) -> float:
    """Milliseconds of a layer and chunk, the median."""
    num_layers, times = SHAPES["host"].num_layers, []
    with as_on_a_gpu(fuses=fuses):
        run = begun(plan)
        if replays:
            run.core.runner.chunk_graphs = ChunkGraphs(captured)
            for _ in range(4):
                run.step()
        for _ in range(30):
            start = time.thread_time()
            run.step()
            times.append(time.thread_time() - start)
    return 1e3 * median(times) / num_layers


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description="What the host takes for a chunk of a prompt.")
    parser.add_argument("--plans", default=",".join(PLANS), help="policies")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = ["| plan | host, ms | fused | replayed |", "|---|--:|--:|--:|"]
    measured = {}
    for plan in options.plans.split(","):
        ways: list[dict[str, bool]] = [{"fuses": False}, {}, {"replays": True}]
        measured[plan] = [host_ms(plan, **one) for one in ways]
        lines.append(f"| {plan} | {' | '.join(f'{one:.2f}' for one in measured[plan])} |")
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
