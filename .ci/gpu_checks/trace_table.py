"""What a trace of `torch.profiler` shows: kernels by time, and when nothing ran; without torch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Categories of events in a trace: what a GPU does, and operations on a CPU.
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op",)

# Groups of kernels by what their names contain, the first that fits.
GROUPS = {
    "attention": ("attend_chunk", "join_chunks", "attention", "flash"),
    "compaction": ("_compact", "_drop_oldest", "gather", "topk", "sort", "scatter"),
    "products": ("gemm", "gemv", "splitk", "nvjet", "cutlass", "aten::mm", "addmm", "matmul"),
    "copies": ("memcpy", "memset", "copy"),
}
OTHERS = "norms, RoPE, casts, others"


@dataclass(frozen=True)
class Kernel:
    """All events of one name: their number, and their time in microseconds."""

    name: str
    count: int
    us: float


@dataclass(frozen=True)
class Table:
    """What ran in a trace.

    Attributes:
        kernels: By name, those that took longest first.
        span_us: From the beginning of the first to the end of the last.
        gaps_us: The part of it in which none ran.
    """

    kernels: tuple[Kernel, ...]
    span_us: float
    gaps_us: float

    @property
    def count(self) -> int:
        """Events in all."""
        return sum(one.count for one in self.kernels)

    @property
    def us(self) -> float:
        """Microseconds in all."""
        return sum(one.us for one in self.kernels)

    def groups_us(self) -> dict[str, float]:
        """Microseconds of each group of kernels."""
        found: dict[str, float] = defaultdict(float)
        for one in self.kernels:
            found[group_of(one.name)] += one.us
        return dict(found)


def table_of(trace: Mapping[str, Any], categories: Iterable[str]) -> Table:
    """Summarize the events of some categories in a Chrome trace; nested ones count once."""
    wanted = set(categories)
    events = sorted(
        (float(one["ts"]), -float(one["dur"]), one["name"])
        for one in trace["traceEvents"]
        if one.get("ph") == "X" and one.get("cat") in wanted
    )
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    begins = events[0][0] if events else 0.0
    reached, gaps = begins, 0.0
    for start, negative, name in events:
        end = start - negative
        if end <= reached and categories is ON_CPU:
            continue  # an operation within another
        counts[name] += 1
        times[name] += end - start
        gaps += max(start - reached, 0.0)
        reached = max(reached, end)
    kernels = sorted(
        (Kernel(name, counts[name], times[name]) for name in counts), key=lambda one: -one.us
    )
    return Table(tuple(kernels), reached - begins, gaps)


def group_of(name: str) -> str:
    """The group of a kernel."""
    lower = name.lower()
    fitting = (group for group, parts in GROUPS.items() if any(part in lower for part in parts))
    return next(fitting, OTHERS)
