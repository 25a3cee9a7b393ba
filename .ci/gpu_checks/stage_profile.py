"""Stage 5: where the time of a decode step goes: kernels, their number, and gaps between them."""

import without_numba  # noqa: F401, I001 - before what imports Numba

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import stage_report
import torch
from bandwidth import synchronize
from bench_model import FULL, QUICK, SPARE, Setting, model_of, plan_named
from stage_report import Report
from torch.profiler import ProfilerActivity, profile
from trace_table import ON_CPU, ON_GPU, Table, table_of

from kvpolicy import Engine
from kvpolicy.lab.bench.contenders.engine import filled_run
from kvpolicy.lab.bench.workload import Decode

CASES = (("h2o", 32), ("full", 32), ("h2o", 1), ("h2o", 128))
QUICK_CASES = (("full", 1), ("h2o", 2))
_STEPS = 16
_LISTED = 12  # kernels


def stage(report: Report) -> None:
    """Profile some steps of each case."""
    started = time.monotonic()
    setting = QUICK if report.quick else FULL
    model = model_of(setting, torch.device(report.device))
    report.say(f"{setting.shape}, {setting.dtype}: built after {time.monotonic() - started:.0f} s")
    for name, batch in QUICK_CASES if report.quick else CASES:
        about = f"{name}, {batch} sequences"
        try:
            wall_ms, profiled_ms, num_steps, table = _profiled(model, setting, name, batch)
        except Exception as error:  # whatever breaks on another device
            report.fail(f"{about}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        if not table.kernels:
            report.fail(f"{about}: the profiler saw nothing on {report.device}")
            continue
        found = figures(table, num_steps) | {"wall_ms": wall_ms, "profiled_wall_ms": profiled_ms}
        report.note(about, found, _line(about, found))
        for kernel in found["kernels"]:
            report.say(
                f"    {kernel['ms']:8.3f} ms  {kernel['count']:8.1f} x  {kernel['name']:.90}"
            )
    report.note("seconds", time.monotonic() - started)


def figures(table: Table, num_steps: int) -> dict[str, Any]:
    """Numbers of a step."""
    per_step_ms = 1e-3 / num_steps
    groups = sorted(table.groups_us().items(), key=lambda one: -one[1])
    return {
        "launches": table.count / num_steps,
        "kernels_ms": table.us * per_step_ms,
        "gaps_ms": table.gaps_us * per_step_ms,
        "groups_ms": {name: us * per_step_ms for name, us in groups},
        "kernels": [
            {"name": one.name, "count": one.count / num_steps, "ms": one.us * per_step_ms}
            for one in table.kernels[:_LISTED]
        ],
    }


def _line(about: str, found: dict[str, Any]) -> str:
    groups = ", ".join(f"{name} {ms:.2f}" for name, ms in found["groups_ms"].items())
    return (
        f"{about}: {found['launches']:.0f} launches a step, kernels {found['kernels_ms']:.2f} ms,"
        f" gaps {found['gaps_ms']:.2f}, wall {found['wall_ms']:.2f}"
        f" (profiled {found['profiled_wall_ms']:.2f}); {groups}"
    )


def _profiled(
    model: Any, setting: Setting, name: str, batch: int
) -> tuple[float, float, int, Table]:
    """Milliseconds of a step without and with the profiler, steps that it saw, and its table."""
    engine = Engine(model, None, plan_named(name, setting), slots=batch)
    run = filled_run(engine, Decode(batch, setting.held, SPARE), steps=SPARE)
    run.step()  # compiled and captured now
    wall_s, num = _steps(run, model.device)
    on_gpu = model.device.type == "cuda"
    cpu, gpu = ProfilerActivity.CPU, ProfilerActivity.CUDA
    # Without what the CPU does, the profiler slows the host least; should it see nothing, with it.
    for activities in ([gpu], [cpu, gpu]) if on_gpu else ([cpu],):
        with profile(activities=activities) as profiler:
            profiled_s, num_profiled = _steps(run, model.device)
        table = table_of(_trace(profiler), ON_GPU if on_gpu else ON_CPU)
        if table.kernels:
            break
    return 1e3 * wall_s / num, 1e3 * profiled_s / num_profiled, num_profiled, table


def _trace(profiler: profile) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text(encoding="utf-8", errors="replace"))


def _steps(run: Any, device: torch.device) -> tuple[float, int]:
    """Seconds of some steps, and how many they were: tokens of several are read together."""
    num_active, num_tokens = len(run.active), 0
    synchronize(device)
    started = time.perf_counter()
    while num_tokens < _STEPS * num_active:
        num_tokens += len(run.step().tokens)
    synchronize(device)
    return time.perf_counter() - started, num_tokens // num_active


if __name__ == "__main__":
    stage_report.main("profile", stage)
