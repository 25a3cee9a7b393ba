"""Stage 4: decode steps beside the limit of the memory, and prefills beside the model's forward."""

import without_numba  # noqa: F401, I001 - before what imports Numba

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import stage_report
import torch
from bandwidth import copy_bandwidth, least_step_s, synchronize
from bench_model import FULL, QUICK, SPARE, Setting, model_of, plan_named, rows_in
from stage_report import Report

from kvpolicy import Engine
from kvpolicy.engine.engine import Run
from kvpolicy.lab.bench.contenders.engine import filled_run
from kvpolicy.lab.bench.models import kv_row_bytes, weight_bytes
from kvpolicy.lab.bench.workload import Decode

PLANS = ("full", "streaming", "h2o", "snapkv", "rkv", "skipkv")
PREFILLED = ("full", "snapkv", "h2o")

# Nothing is begun after so many seconds, nor what would end later.
_SECONDS = 130
_LONG_S = 8
_USABLE = 0.92  # of the memory of a card: the rest is for activations and graphs


def stage(report: Report) -> None:
    """Measure in the order of what matters most, and report each figure as it is known."""
    started = time.monotonic()
    setting = QUICK if report.quick else FULL
    device = torch.device(report.device)
    bytes_per_s = copy_bandwidth(device, quick=report.quick)
    report.note("copy_bytes_per_s", bytes_per_s)
    model = model_of(setting, device)
    report.say(f"{setting.shape}, {setting.dtype}: built after {time.monotonic() - started:.0f} s")
    speeds = Speeds(report, model, setting, bytes_per_s, started + _SECONDS)
    for kind, num in setting.work:
        (speeds.add_steps if kind == "steps" else speeds.add_prefills)(num)
    report.note("seconds", time.monotonic() - started)


@dataclass
class Speeds:
    """Figures of a model, in the order in which they are measured."""

    report: Report
    model: Any
    setting: Setting
    bytes_per_s: float
    ends: float
    steps: list[dict[str, Any]] = field(default_factory=list)
    prefills: list[dict[str, Any]] = field(default_factory=list)

    def add_steps(self, batch: int) -> None:
        """Measure decode steps of all plans."""
        for name in PLANS:
            about = f"{name}, {batch} sequences"
            row = self._attempt(
                about, partial(_steps, self.model, self.setting, self.bytes_per_s, name, batch)
            )
            if row is not None:
                self.steps.append(row)
                line = (
                    f"{about}: {row['step_ms']:.2f} ms a step, limit {row['limit_ms']:.2f},"
                    f" share {row['share']:.2f}, {row['tokens_per_s']:,.0f} tokens/s,"
                    f" policy {row['policy_share']:.0%}, {row['path']}"
                )
                self.report.note("steps", self.steps, line)

    def add_prefills(self, num_tokens: int) -> None:
        """Measure the model's own forward of a prompt, and how long plans take to bring it in."""
        rng = torch.Generator().manual_seed(0)
        prompt = torch.randint(self.model.config.vocab_size, (num_tokens,), generator=rng).tolist()
        for name in ("transformers", *PREFILLED):
            about = f"prefill of {num_tokens:,} tokens, {name}"
            before = [row["tokens_per_s"] for row in self.prefills if row["by"] == name]
            seconds = self._attempt(
                about,
                partial(_prefill_s, self.model, self.setting, name, prompt),
                expected_s=num_tokens / before[-1] if before else 0.0,
            )
            if seconds is not None:
                speed = num_tokens / seconds
                row = {"tokens": num_tokens, "by": name, "s": seconds, "tokens_per_s": speed}
                self.prefills.append(row)
                line = f"{about}: {seconds:.2f} s, {speed:,.0f} tokens/s"
                self.report.note("prefills", self.prefills, line)

    def _attempt(self, about: str, measure: Callable[[], Any], *, expected_s: float = 0.0) -> Any:
        """Measure while there is time; what raises fails the stage, and the rest is measured."""
        if time.monotonic() + expected_s > self.ends:
            self.report.say(f"{about}: not measured, time is up ({expected_s:.0f} s expected)")
            return None
        try:
            found = measure()
        except Exception as error:  # whatever breaks on another device
            self.report.fail(f"{about}: {type(error).__name__}: {error}".splitlines()[0])
            return None
        finally:
            gc.collect()
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
        if found is None:
            self.report.say(f"{about}: does not fit into the memory")
        return found


def _steps(
    model: Any, setting: Setting, bytes_per_s: float, name: str, batch: int
) -> dict[str, Any] | None:
    """Decode steps in a steady state, where the slabs fit."""
    needed = batch * rows_in(name, setting) * kv_row_bytes(model) + weight_bytes(model)
    if needed > _memory(model.device):
        return None
    # One sequence is compacted once in as many steps as its buffer has rows; of many, some are in
    # every step.
    num_steps = setting.buffer if batch == 1 else 48 if batch < 100 else 24
    work = Decode(batch, setting.held, min(num_steps, SPARE // 2))
    engine = Engine(model, None, plan_named(name, setting), slots=batch)
    run = filled_run(engine, work, steps=SPARE)
    run.step()  # compiled and captured now
    step_s, read_bytes, policy_share = _timed(run, work.steps)
    least = least_step_s(weight_bytes(model), read_bytes, bytes_per_s)
    return {
        "plan": name,
        "batch": batch,
        "step_ms": 1e3 * step_s,
        "limit_ms": 1e3 * least,
        "share": least / step_s,
        "tokens_per_s": batch / step_s,
        "policy_share": policy_share,
        "kv_bytes": run.report.peak_kv_bytes,
        "path": run.report.path,
    }


def _timed(run: Run, least_steps: int) -> tuple[float, float, float]:
    """Seconds of a step, bytes of the rows that it reads, and the share of policies; means."""
    device, before = run.engine.adapter.device, run.report
    row_bytes = [layer.shape.row_bytes for layer in run.cache.layers]
    num_steps, read_bytes = 0, 0.0
    synchronize(device)
    started = time.perf_counter()
    while num_steps < least_steps:
        num_active, held = len(run.active), run.cache.rows.sum(axis=1)
        num = len(run.step().tokens) // num_active
        # A step attends to the rows before it and to its own.
        read_bytes += sum(float(row_bytes @ (held + i * num_active)) for i in range(1, num + 1))
        num_steps += num
    synchronize(device)
    seconds, after = time.perf_counter() - started, run.report
    policy_s = after.decode_policy_s - before.decode_policy_s
    return seconds / num_steps, read_bytes / num_steps, policy_s / seconds


def _memory(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    return _USABLE * torch.cuda.get_device_properties(device).total_memory


def _prefill_s(model: Any, setting: Setting, name: str, prompt: list[int]) -> float:
    """Seconds until a prompt is in; the better of two where one is short."""
    if name == "transformers":
        ids = torch.tensor([prompt], device=model.device)

        @torch.inference_mode()
        def run() -> None:
            model(input_ids=ids, use_cache=True, logits_to_keep=1)
    else:
        engine = Engine(model, None, plan_named(name, setting), slots=1)

        def run() -> None:
            engine.generate([prompt], max_new_tokens=1, stop_ids=()).results()

    first = _seconds(run, model.device)
    return first if first > _LONG_S else min(first, _seconds(run, model.device))


def _seconds(act: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    act()
    synchronize(device)
    return time.perf_counter() - started


if __name__ == "__main__":
    stage_report.main("speeds", stage)
