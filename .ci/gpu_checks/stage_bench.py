"""Stage 4: `kvpolicy bench --gpu`: decode steps, what the card does in one, and prompts."""

import without_numba  # noqa: F401, I001 - before what imports Numba

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import stage_report
from stage_report import Report

MINUTES = {"cuda": 4, "cpu": 15}
BATCHES = "32,1,128,256"
# The default plans, of which one is the full cache in 8 bits, and another one.
PLANS = ["--preset", "baselines", "--plan", str(Path(__file__).parent / "h2o-int8.toml")]


def stage(report: Report) -> None:
    """Run the command; it prints and stores each figure as it is known."""
    from kvpolicy.cli.app import run
    from kvpolicy.lab.bench.rounds.turn_file import RESULT

    started = time.monotonic()
    folder = report.out / "bench"
    options = ["--device", report.device, "--minutes", str(MINUTES[report.device])]
    if report.quick:
        options += ["--quick", "--dtype", "float32"]
    else:
        options += ["--batches", BATCHES]
    status = run(["bench", "--gpu", "--output", str(folder), *PLANS, *options])
    if status:
        report.fail(f"kvpolicy bench --gpu ended with status {status}")
    result = folder / RESULT
    if result.exists():
        for problem in problems_in(json.loads(result.read_text(encoding="utf-8"))):
            report.fail(problem)
    report.note("seconds", time.monotonic() - started)


def problems_in(found: Mapping[str, Any]) -> Iterator[str]:
    """What has failed, and of what the profiler saw nothing."""
    for one in found["missing"]:
        if one["failed"]:
            yield f"{', '.join(one['job'])}: {one['reason']}"
    for one in found["standings"]:
        if one["profile"] and one["profile"]["problem"]:
            yield f"{one['name']}, {one['work']}: {one['profile']['problem']}"


if __name__ == "__main__":
    stage_report.main("bench", stage)
