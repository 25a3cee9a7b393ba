"""What the host does in a decode step, and how long it takes, on a device that only records.

    python tests/support/host_time.py                           # 1, 32 and 256 sequences
    python tests/support/host_time.py --batch 256 --plans full,h2o --json host.json

A step of the engine is run as on a GPU whose steps are replayed from graphs: a replay costs nothing
and leaves tokens of a given sequence. What is left is the work of the host: whom to serve, what is
due, the arguments of the step, its launch, its tokens, and the requests that have ended. The model
has the 36 layers of Qwen3-8B, so that there are as many counts to keep, but tiny ones.

Rows are evicted down to a budget of 64 with a buffer of 128, and every sequence is due at a step of
its own: at 256 sequences, two of them in each step. Their rows are tiny, and on the CPU, where an
operation takes a few microseconds: about what a launch costs the host on a GPU.

A step is divided by the words of `Run._advance`; ``rest`` is what it returns of the step. Medians
over all steps, and the mean, since one step in several evicts. Times are those that the thread has
run, so that other programs on the machine change them little.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import attrs
import torch

from kvpolicy.engine.core import Core
from kvpolicy.engine.engine import Engine, Run
from kvpolicy.engine.evictor import Evictor
from kvpolicy.engine.sampler import Sampler
from kvpolicy.engine.scheduler import Scheduler
from kvpolicy.lab.bench.contenders.engine import filled_run
from kvpolicy.lab.bench.models import SHAPES, random_model
from kvpolicy.lab.bench.workload import Decode
from kvpolicy.lab.sweep.grid import build_cells
from kvpolicy.lab.sweep.sweep_file import Series
from kvpolicy.model.graphs import Graph, GraphRunner

BUDGET, BUFFER = 64, 128
HELD = 200  # tokens of each text, more than the budget and the buffer
SHAPE = attrs.evolve(SHAPES["host"], num_heads=2, num_kv_heads=1)
PLANS = ["full", "streaming", "h2o", "rkv"]
WARM_UP = 20

# The words of a step, and what does them.
WORDS: dict[str, tuple[type, str]] = {
    "admit": (Scheduler, "admit"),
    "evict": (Evictor, "evict"),
    "schedule": (Scheduler, "schedule"),
    "run": (Core, "run"),
    "sample": (Sampler, "sample"),
    "commit": (Core, "commit"),
    "finish": (Scheduler, "finish"),
}


class Recorded:
    """Captures steps whose replay computes nothing."""

    def __init__(self, run: Run) -> None:
        self._runner = run.core.runner
        self._vocab_size = run.engine.adapter.vocab_size
        self.replays = 0

    def __call__(self, captured: Callable[[], Any]) -> Graph:
        """A graph in place of what is to be captured."""
        static = self._runner.static
        assert static is not None
        logits = torch.zeros(static.width, self._vocab_size)

        def replay() -> None:
            self.replays += 1
            static.tokens.fill_(self.replays % self._vocab_size)

        return Graph(replay, (logits, None))


def recorded_run(
    plan: str, batch: int, steps: int, steps_per_read: int = 2
) -> tuple[Run, Recorded]:
    """A run in a steady state, whose next steps are replayed by a device that records."""
    model = random_model(SHAPE, 0, max_positions=4096, dtype="bfloat16")
    (cell,) = build_cells(
        [Series.from_stack(plan)], num_layers=SHAPE.num_layers, budgets=[BUDGET], buffer=BUFFER
    )
    engine = Engine(model, None, cell.resolved, slots=batch, steps_per_read=steps_per_read)
    run = filled_run(engine, Decode(batch=batch, held=HELD, steps=steps), steps=steps)
    runner, evictor = run.core.runner, run.evictor
    recorded = Recorded(run)
    assert runner.static is not None
    runner.static.in_graph = True
    runner.graphs = GraphRunner(runner.as_it_is, capture=recorded)
    evictor.defers, evictor.call_bytes = True, 512 << 20  # as on a GPU
    return run, recorded


@contextmanager
def timed(spent: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of each word in a block."""

    def watch(word: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                spent[word] += time.thread_time() - start

        return call

    with ExitStack() as patches:
        for word, (owner, name) in WORDS.items():
            patches.enter_context(patch.object(owner, name, watch(word, getattr(owner, name))))
        yield


def measure(plan: str, batch: int, steps: int, steps_per_read: int) -> dict[str, Any]:
    """Microseconds of a step and of each of its words."""
    run, recorded = recorded_run(plan, batch, steps + WARM_UP + 8, steps_per_read)
    for _ in range(WARM_UP):
        run.step()
    times: dict[str, list[float]] = defaultdict(list)
    before = run.report.compactions
    spent: dict[str, float] = defaultdict(float)
    recorded.replays = 0
    with timed(spent):
        while recorded.replays < steps:
            spent.clear()
            start = time.thread_time()
            run.step()
            whole = time.thread_time() - start
            for word in WORDS:
                times[word].append(1e6 * spent[word])
            times["rest"].append(1e6 * (whole - sum(spent.values())))
            times["step"].append(1e6 * whole)
    compactions = (run.report.compactions - before) / SHAPE.num_layers
    return {
        "plan": plan,
        "batch": batch,
        "median_us": {word: median(found) for word, found in times.items()},
        "mean_us": {word: fmean(found) for word, found in times.items()},
        "evicted_a_step": compactions / len(times["step"]),
    }


def table(measured: list[dict[str, Any]]) -> str:
    """Markdown: a row for each plan and batch."""
    words = [*WORDS, "rest"]
    head = ["plan", "sequences", "µs a step", "mean", *words]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    for one in measured:
        found = one["median_us"]
        cells = [one["plan"], str(one["batch"]), f"{found['step']:.0f}"]
        cells += [f"{one['mean_us']['step']:.0f}", *(f"{found[word]:.0f}" for word in words)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the host does in a decode step.")
    parser.add_argument("--batch", default="1,32,256", help="sequences that are decoded together")
    parser.add_argument("--plans", default=",".join(PLANS), help="policies")
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each")
    parser.add_argument(
        "--steps-per-read", type=int, default=2, help="see Engine; 1: tokens are read at once"
    )
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    measured = []
    for plan in options.plans.split(","):
        for batch in map(int, options.batch.split(",")):
            measured.append(measure(plan, batch, options.steps, options.steps_per_read))
            sys.stderr.write(f"{plan}, {batch}: done\n")
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{table(measured)}\n")


if __name__ == "__main__":
    main()
