"""Stages: which there are, and running them, each bounded in time and independent of the others."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]

# Seconds after which a stage is ended, and what it has printed and written until then stays. All
# together take less than the ten minutes for which a machine may be lent.
STAGES = {"versions": 60, "tests": 110, "tokens": 150, "bench": 260}

# A rehearsal is bounded, too, but a loaded processor is no reason to fail.
REHEARSED = dict.fromkeys(STAGES, 1200)

_GRACE_S = 5


@dataclass(frozen=True)
class Run:
    """What all stages have in common."""

    out: Path
    device: str
    quick: bool
    environment: Mapping[str, str]
    folder: Path = FOLDER


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: with a status, or with ``None`` because its time was up."""

    name: str
    status: int | None
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return self.status == 0


def run_stages(
    names: Sequence[str], run: Run, limits: Mapping[str, float] | None = None
) -> list[Outcome]:
    """Run stages in order, whatever fails; ``OUT/gpu.log`` has what they print."""
    limits = limits or (REHEARSED if run.device == "cpu" else STAGES)
    outcomes: list[Outcome] = []
    with (run.out / "gpu.log").open("a", encoding="utf-8") as log:
        try:
            for name in names:
                _print(f"== {name}, at most {limits[name]:.0f} s", log)
                outcomes.append(_run_stage(name, run, limits[name], log))
                _print(f"== {_sentence(outcomes[-1])}", log)
        except KeyboardInterrupt:
            ended = [one.name for one in outcomes]
            outcomes += [Outcome(name, None, 0.0) for name in names if name not in ended]
        log.write(summary(outcomes))
    stages = [asdict(one) for one in outcomes]
    (run.out / "summary.json").write_text(json.dumps(stages, indent=1), encoding="utf-8")
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    """A line for each stage."""
    lines = [_sentence(one) for one in outcomes]
    failed = [one.name for one in outcomes if not one.passed]
    end = f"FAILED: {', '.join(failed)}" if failed else "All stages passed."
    return "\n".join(["", *lines, f"{end} {sum(one.seconds for one in outcomes):.0f} s", ""])


def _sentence(outcome: Outcome) -> str:
    words = {0: "passed", None: "was ended: its time was up"}
    how = words.get(outcome.status, f"FAILED with status {outcome.status}")
    return f"{outcome.name:9} {outcome.seconds:6.1f} s  {how}"


def _run_stage(name: str, run: Run, limit_s: float, log) -> Outcome:
    """One stage in a session of its own, so that all its processes end with it."""
    command = [sys.executable, str(run.folder / f"stage_{name}.py"), str(run.out), run.device]
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, *["--quick"] * run.quick],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=dict(run.environment),
        start_new_session=True,
    )
    reader = threading.Thread(target=_copy_lines, args=(process.stdout, log, started), daemon=True)
    reader.start()
    status: int | None = None
    try:
        status = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _end(process)
        reader.join(timeout=_GRACE_S)
    return Outcome(name, status, time.monotonic() - started)


def _end(process: subprocess.Popen) -> None:
    """End what is left of a session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def _copy_lines(lines, log, started: float) -> None:
    """Print lines with the seconds since the stage began, so that what takes long is seen."""
    with lines:
        for line in lines:
            _print(f"{time.monotonic() - started:6.1f} {line}".rstrip(), log)


def _print(line: str, log) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    log.write(f"{line}\n")
    log.flush()
