"""Memory over a long text: what the cache and the process hold while one sequence grows."""

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
    """What was held when so many tokens were out.

    Attributes:
        name: Whose plan it is.
        new_tokens: Tokens generated so far.
        kv_bytes: Bytes of the cache at its largest so far.
        full_bytes: Bytes of the keys and values of all tokens so far, if they had stayed.
        rss_bytes: Bytes of the process that are in memory, the model's included.
        step_ms: Median time of a decode step since the reading before.
    """

    name: str
    new_tokens: int
    kv_bytes: int
    full_bytes: int
    rss_bytes: int
    step_ms: float


def watch(
    model: PreTrainedModel, cell: Cell, prompt: Sequence[int], lengths: Sequence[int]
) -> Iterator[Reading]:
    """Generate one long text, and look at the memory on the way.

    Args:
        model: The model, with positions for all tokens.
        cell: The plan.
        prompt: Where the text begins.
        lengths: Generated tokens at which to look, rising.

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
            begun = time.perf_counter()
            num_done += len(run.step().tokens)
            times.append(time.perf_counter() - begun)
        yield Reading(
            name=cell.series,
            new_tokens=num_done,
            kv_bytes=run.report.peak_kv_bytes,
            full_bytes=row_bytes * (len(prompt) + num_done),
            rss_bytes=resident_bytes(),
            step_ms=median(times or [0.0]) * 1e3,
        )


def resident_bytes() -> int:
    """Bytes of this process in memory; the most it ever had where the system tells no more."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
