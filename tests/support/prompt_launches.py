"""What a chunk of a prompt launches on a GPU, and what the host takes for it, without a GPU.

    python tests/support/prompt_launches.py
    python tests/support/prompt_launches.py --plans full,h2o --json prompts.json

Launches are counted on the device ``meta``, where tensors have no numbers: operators that compute
something, of which those of `kvpolicy.model.fused` are one each, as are attention that is causal
and a compaction, which are kernels on a GPU. A chunk in the middle of one prompt is counted, at two
numbers of layers: the difference is what each layer launches, the rest what the chunk does.

The host's time is that of a thread on a CPU, of a chunk of few tokens in 36 layers that compute
next to nothing: fused operators, causal attention and compactions are allocations. A launch takes
longer than these. Once with the model's own operators, and once with fused ones.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvpolicy import Engine, Plan, Request
from kvpolicy.engine.engine import Run
from kvpolicy.lab.bench.models import SHAPES, random_model
from kvpolicy.model.fused.operators import ADD_NORM, GATE, NORM, ROTATE

PLANS = ["full", "streaming", "snapkv", "rkv", "h2o"]
LAYERS = (4, 8)
_NOT_COMPUTING = ("aten::empty", "aten::new_empty", "aten::lift_fresh")


class Stub:
    """Moves rows: one kernel on a GPU."""

    @staticmethod
    def compact(slab: Tensor, *_: Any, **__: Any) -> None:
        """Change a slab in one operator."""
        slab.add_(0)


class NotRead:
    """In place of numbers that come from a device: they are never there."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tensor.shape

    def read(self) -> Any:
        """Zeros."""
        return torch.zeros(self._shape, dtype=torch.int64).numpy()


class Counting(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        result = func(*args, **kwargs or {})
        schema, given = func._schema, _memory((args, kwargs or {}))
        made = _memory(result)
        is_view = not schema.is_mutable and made <= given
        if not is_view and not schema.name.startswith(_NOT_COMPUTING):
            self.operators[schema.name] += 1
        return result


def _memory(tensors: Any) -> set[int]:
    found = (one for one in tree_leaves(tensors) if isinstance(one, Tensor))
    return {one.untyped_storage()._cdata for one in found}


def _zeros(*alike: Tensor) -> Any:
    made = tuple(map(torch.zeros_like, alike))
    return made if len(made) > 1 else made[0]


ALLOCATIONS = {
    NORM: lambda states, *_: _zeros(states),
    ADD_NORM: lambda states, added, *_: _zeros(states, added),
    ROTATE: lambda query, key, *_: _zeros(query, key),
    GATE: lambda gate, _: torch.zeros(gate.shape, dtype=gate.dtype),
}


@contextmanager
def as_on_a_gpu(*, fuses: bool, on_meta: bool) -> Iterator[None]:
    """Run prompts as on a GPU in a block, with the model's own operators or with fused ones."""
    replaced: dict[str, Any] = {
        "kvpolicy.engine.runner.Runner._fuses": lambda *_: fuses,
        "kvpolicy.model.fused_prompts.are_close": lambda *_: True,
        "kvpolicy.cache.layouts.staged.backend_for": lambda *_: Stub,
        "kvpolicy.cache.layouts.even.backend_for": lambda *_: Stub,
        "kvpolicy.attention.fused._lower_right": lambda queries, *_: queries.new_zeros(
            queries.shape
        ),
    }
    if on_meta:
        replaced["kvpolicy.hooks.late_checks.Download"] = NotRead
        replaced["kvpolicy.model.adapter.ModelAdapter.check_forward"] = lambda *_, **__: None
    else:
        replaced["kvpolicy.model.fused_prompts.kernels_on"] = lambda _: ALLOCATIONS
    with ExitStack() as patches:
        for name, one in replaced.items():
            patches.enter_context(patch(name, one))
        yield


def begun(plan: str, *, num_layers: int, chunk: int, num_chunks: int, device: str) -> Run:
    """A run in the middle of its prompt."""
    shape = attrs.evolve(SHAPES["host"], num_layers=num_layers)
    positions = chunk * (num_chunks + 1)
    model = random_model(shape, 0, max_positions=positions, dtype="bfloat16", device=device)
    bounds = {} if plan == "full" else {"budget": chunk, "buffer": chunk // 8}
    staged = {} if plan == "full" else {"prefill_buffer": chunk}
    engine = Engine(model, plan=Plan.uniform(plan, **bounds, **staged), slots=1, chunk=chunk)
    run = engine.generate([Request([1] * (chunk * num_chunks), 2, stop_ids=())])
    run.evictor.defers, run.evictor.call_bytes = True, 512 << 20
    for _ in range(3):
        run.step()
    return run


def launches(plan: str, *, fuses: bool) -> tuple[float, float]:
    """What each layer launches for a chunk, and what the chunk does beside."""
    totals = []
    with as_on_a_gpu(fuses=fuses, on_meta=True):
        for num_layers in LAYERS:
            run = begun(plan, num_layers=num_layers, chunk=1024, num_chunks=8, device="meta")
            with Counting() as counted:
                run.step()
            totals.append(counted.operators.total())
    few, many = LAYERS
    of_layer = (totals[1] - totals[0]) / (many - few)
    return of_layer, totals[0] - few * of_layer


def host_ms(plan: str, *, fuses: bool) -> float:
    """Milliseconds of a layer and chunk, the median."""
    num_layers, times = SHAPES["host"].num_layers, []
    with as_on_a_gpu(fuses=fuses, on_meta=False):
        run = begun(plan, num_layers=num_layers, chunk=16, num_chunks=40, device="cpu")
        for _ in range(30):
            start = time.thread_time()
            run.step()
            times.append(time.thread_time() - start)
    return 1e3 * median(times) / num_layers


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description="What a chunk of a prompt launches.")
    parser.add_argument("--plans", default=",".join(PLANS), help="policies")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = ["| plan | launches | fused | of a chunk | fused | host, ms | fused |"]
    lines.append("|---|" + "--:|" * 6)
    measured = {}
    for plan in options.plans.split(","):
        (own, chunk), (fused, of_fused) = (launches(plan, fuses=one) for one in (False, True))
        times = [host_ms(plan, fuses=one) for one in (False, True)]
        measured[plan] = {"launches": [own, fused], "of_chunk": [chunk, of_fused], "host_ms": times}
        cells = [f"{one:g}" for one in (own, fused, chunk, of_fused)]
        cells += [f"{one:.2f}" for one in times]
        lines.append(f"| {plan} | {' | '.join(cells)} |")
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
