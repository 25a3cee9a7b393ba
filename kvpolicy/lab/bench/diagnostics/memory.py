"""Memory of cache and process during the generation of one long text."""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import attrs
from transformers import PreTrainedModel

from kvpolicy.engine.engine import Engine
from kvpolicy.lab.sweep.grid import Cell


@attrs.frozen
class Reading:
    """Memory after a number of generated tokens.

    Attributes:
        name: Name of the plan.
        new_tokens: Tokens generated so far.
        kv_bytes: Peak bytes of the cache so far.
        full_bytes: Bytes of the keys and values of all tokens so far, had none been evicted.
        rss_bytes: Resident bytes of the process, the model included.
        step_ms: Median milliseconds of a decode step since the previous reading.
    """

    name: str
    new_tokens: int
    kv_bytes: int
    full_bytes: int
    rss_bytes: int
    step_ms: float


def measure_memory(
    model: PreTrainedModel, cell: Cell, prompt: Sequence[int], lengths: Sequence[int]
) -> Iterator[Reading]:
    """Generate one long text, and measure memory at given lengths.

    Args:
        model: The model, with positions for all tokens.
        cell: The plan.
        prompt: Token ids of the prompt.
        lengths: Numbers of generated tokens at which to measure, in ascending order.

    Yields:
        A reading at each length.
    """
    engine = Engine(model, None, cell.resolved, slots=1)
    run = engine.generate([prompt], max_new_tokens=max(lengths) + 1, stop_ids=())
    row_bytes = sum(layer.shape.row_bytes for layer in run.cache.layers)
    num_done = 0
    for length in lengths:
        times = []
        while num_done < length:
            start = time.perf_counter()
            num_done += len(run.step().tokens)
            times.append(time.perf_counter() - start)
        yield Reading(
            name=cell.series,
            new_tokens=num_done,
            kv_bytes=run.report.peak_kv_bytes,
            full_bytes=row_bytes * (len(prompt) + num_done),
            rss_bytes=resident_bytes(),
            step_ms=median(times or [0.0]) * 1e3,
        )


def resident_bytes() -> int:
    """Resident bytes of this process; its peak on systems without ``/proc``."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
