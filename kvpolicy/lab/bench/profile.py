"""Where the time of a decode step goes on a device: kernels, launches, and gaps between them.

On a CPU, which launches nothing, operations of torch stand in for kernels.
"""

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import attrs
import torch
from torch.profiler import ProfilerActivity, profile

from kvpolicy.lab.bench.timing import synchronized_time

# Categories of events in a trace.
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_CPU = ("cpu_op",)

# Kinds of kernels by what their names contain, the first that fits.
KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("_append", "attend_", "join_chunks", "_add_up", "attention", "flash"),
    "norms": ("_norm",),
    "RoPE": ("_rotate",),
    "gates": ("_gate",),
    "compaction": ("_compact", "_drop_oldest", "gather", "topk", "sort", "scatter"),
    "products": (
        "gemm",
        "gemv",
        "splitk",
        "nvjet",
        "cutlass",
        "aten::mm",
        "addmm",
        "linear",
        "matmul",
    ),
    "copies": ("memcpy", "memset", "copy"),
}
OTHERS = "others"

_LISTED = 12  # kernels


@attrs.frozen
class Kernel:
    """All launches of one name in a step: how many, and milliseconds."""

    name: str
    launches: float
    ms: float


@attrs.frozen
class StepProfile:
    """What a device did in a step, the mean over some steps.

    Attributes:
        launches: Kernels, copies and fills that it ran.
        kernels_ms: Milliseconds of these.
        gaps_ms: Milliseconds in which none ran.
        profiled_ms: Milliseconds of a step on the host's clock while it was profiled.
        kinds_ms: Milliseconds by what kernels are for: the keys of `KINDS`, and `OTHERS`.
        kernels: Those that took longest.
        problem: Why nothing is known; empty if something is.
    """

    launches: float
    kernels_ms: float
    gaps_ms: float
    profiled_ms: float
    kinds_ms: Mapping[str, float]
    kernels: tuple[Kernel, ...]
    problem: str = ""

    @classmethod
    def unknown(cls, problem: str) -> Self:
        """Nothing is known."""
        return cls(0.0, 0.0, 0.0, 0.0, {}, (), problem)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """The profile of which ``attrs.asdict`` was stored."""
        kernels = tuple(Kernel(**one) for one in record["kernels"])
        return cls(**{**record, "kernels": kernels})


def profile_steps(take_steps: Callable[[], int], device: torch.device) -> StepProfile:
    """Profile steps.

    Args:
        take_steps: Takes some steps and returns how many they were; it may be called twice.
        device: Where they run.
    """
    # Else the profiler writes lines of its own to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    on_gpu = device.type == "cuda"
    cpu, gpu = ProfilerActivity.CPU, ProfilerActivity.CUDA
    try:
        # Without what the CPU does, the profiler slows the host least; should it see nothing, with.
        for activities in ([gpu], [cpu, gpu]) if on_gpu else ([cpu],):
            started = synchronized_time(device)
            with profile(activities=activities) as profiler:
                num_steps = take_steps()
                profiled_s = synchronized_time(device) - started
            found = profile_of(_trace(profiler), num_steps, profiled_s, on_gpu=on_gpu)
            if found.launches:
                return found
    except RuntimeError as error:  # a driver may allow no profiler
        return StepProfile.unknown(f"{type(error).__name__}: {error}".splitlines()[0])
    return StepProfile.unknown(f"the profiler saw nothing on {device}")


def profile_of(
    trace: Mapping[str, Any], num_steps: int, profiled_s: float, *, on_gpu: bool
) -> StepProfile:
    """What a Chrome trace shows of steps that took so many seconds.

    An operation on a CPU within another counts with that; kernels count wherever they run.
    """
    wanted = _ON_GPU if on_gpu else _ON_CPU
    events = sorted(
        (float(one["ts"]), -float(one["dur"]), one["name"])
        for one in trace["traceEvents"]
        if one.get("ph") == "X" and one.get("cat") in wanted
    )
    counts: dict[str, int] = defaultdict(int)
    times_us: dict[str, float] = defaultdict(float)
    reached, gaps_us = events[0][0] if events else 0.0, 0.0
    for start, negative, name in events:
        end = start - negative
        if end <= reached and not on_gpu:
            continue
        counts[name] += 1
        times_us[name] += end - start
        gaps_us += max(start - reached, 0.0)
        reached = max(reached, end)
    per_step_ms = 1e-3 / num_steps
    kernels = [
        Kernel(name, counts[name] / num_steps, us * per_step_ms) for name, us in times_us.items()
    ]
    kernels.sort(key=lambda one: -one.ms)
    kinds_ms: dict[str, float] = dict.fromkeys((*KINDS, OTHERS), 0.0)
    for one in kernels:
        kinds_ms[kind_of(one.name)] += one.ms
    return StepProfile(
        launches=sum(counts.values()) / num_steps,
        kernels_ms=sum(times_us.values()) * per_step_ms,
        gaps_ms=gaps_us * per_step_ms,
        profiled_ms=1e3 * profiled_s / num_steps,
        kinds_ms=kinds_ms,
        kernels=tuple(kernels[:_LISTED]),
    )


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    lower = name.lower()
    fitting = (kind for kind, parts in KINDS.items() if any(part in lower for part in parts))
    return next(fitting, OTHERS)


def _trace(profiler: profile) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text(encoding="utf-8", errors="replace"))
