"""What a request costs each eviction of blocks, beside LRU.

    python docs/benchmarks/guard_cost.py                          # 1,000 and 10,000 blocks
    python docs/benchmarks/guard_cost.py --capacities 100,100000 --json cost.json

A store of the capacity, of which any block may leave, serves 20 requests for each of its blocks.
They are for four times as many blocks, by Zipf's distribution, some of whose ranks change on the
way. A figure is the time of a whole simulation, that of the store included, by the number of
requests: the median of the rounds, each of which runs every eviction once. In brackets is the ratio
to LRU of the same round, again the median.

``guard, worst predictions`` is told that the blocks that are asked for next are asked for last, so
it guards and draws at random as often as can be.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from kvpolicy_plugins.guard.instances import drifting_popularity, reversed_predictor
from kvpolicy_plugins.guard.simulation import simulate

from kvpolicy import BlockEviction, load_block_eviction
from kvpolicy.block_eviction import CheckedBlockEviction

REQUESTS_PER_BLOCK = 20
BASELINE = "lru"
SERIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lru": ("lru", {}),
    "marker": ("marker", {}),
    "blind_oracle": ("blind_oracle", {}),
    "lmarker": ("lmarker", {}),
    "predictive_marker": ("predictive_marker", {}),
    "guard": ("guard", {}),
    "guard, recency": ("guard", {"predictor": "recency"}),
    "guard, pleco": ("guard", {"predictor": "pleco"}),
    "guard, learned": ("guard", {"predictor": "learned"}),
    "guard, worst predictions": ("guard", {}),
}


def build(series: str, capacity: int, trace: list[int]) -> BlockEviction:
    """The eviction of a series, without the checks of `load_block_eviction`."""
    name, knobs = SERIES[series]
    if series.endswith("worst predictions"):
        knobs = {"predictor": reversed_predictor(trace)}
    checked: CheckedBlockEviction = load_block_eviction(
        name, capacity=capacity, rng=Random(0), **knobs
    )
    return checked.inner


def measure(capacity: int, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Microseconds of a request, for each series and round.

    Args:
        capacity: Blocks of the store.
        rounds: Simulations of each series.
        clock: Gives seconds.
    """
    trace = drifting_popularity(REQUESTS_PER_BLOCK * capacity, 4 * capacity, seed=0)
    times: dict[str, list[float]] = {series: [] for series in SERIES}
    for _ in range(rounds):
        for series, found in times.items():
            eviction = build(series, capacity, trace)
            start = clock()
            simulate(trace, capacity, eviction)
            found.append(1e6 * (clock() - start) / len(trace))
    return times


def table(measured: dict[int, dict[str, list[float]]]) -> str:
    """Markdown: a row for each series, a column for each capacity."""
    lines = [
        "| µs per request | " + " | ".join(f"{k:,} blocks" for k in measured) + " |",
        "|---|" + "--:|" * len(measured),
    ]
    for series in SERIES:
        cells = []
        for times in measured.values():
            pairs = zip(times[series], times[BASELINE], strict=True)
            ratio = median(time / base for time, base in pairs)
            cells.append(f"{median(times[series]):.2f} ({ratio:.1f})")
        lines.append(f"| {series} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Cost of evictions of blocks, beside LRU.")
    parser.add_argument("--capacities", default="1000,10000", help="blocks of the stores")
    parser.add_argument("--rounds", type=int, default=5, help="simulations of each eviction")
    parser.add_argument("--json", type=Path, help="a file for the times of every round")
    options = parser.parse_args(arguments)
    capacities = [int(part) for part in options.capacities.split(",")]
    measured = {k: measure(k, options.rounds, time.process_time) for k in capacities}
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    print(table(measured))


if __name__ == "__main__":
    main()
