"""Stage 2: tests of kernels and graphs, and those that take `--device`, on the card.

Without a card, the tests run in Triton's interpreter; `tests/attention/test_compile.py` compiles
all kernels for sm_90 in either case. Without Numba, which compiles for longer than the tests take,
and whose attention is that of a CPU.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import stage_report
from stage_report import Report

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]

# Tests of what runs on cards only, or stands in for it; and folders with tests that take a device.
ALL_OF = (
    "tests/attention",
    "tests/toolkit/test_triton_redundancy.py",
    "tests/model/test_triton_fused.py",
    "tests/model/test_graphs.py",
    "tests/model/test_graph_guard.py",
    "tests/model/test_prompt_attention.py",
)
# What a rehearsal runs of these: the interpreter takes minutes for the others.
QUICK_OF = (
    "tests/attention/test_compile.py",
    "tests/attention/test_triton_compact.py",
    "tests/model/test_graph_guard.py",
)
SOME_OF = ("tests/cache", "tests/hooks", "tests/engine")

_TAKES_DEVICE = re.compile(r"^def (test_\w+)\([^)]*\bdevice: torch\.device", re.M)
_PROCESSES = {"cuda": 10, "cpu": 0}  # few tests: starting processes would take longer
_SHOWN = 20  # failures


def stage(report: Report) -> None:
    """Run the tests."""
    started = time.monotonic()
    found_first = (str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found_first)}
    if report.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        names = [*(QUICK_OF if report.quick else ALL_OF), *tests_on_a_device(ROOT)]
        done = subprocess.run(
            [*pytest_command(report.device), f"--junitxml={junit}", *names],
            cwd=ROOT,
            env=environment,
            check=False,
        )
        if not junit.exists():
            report.fail(f"pytest ended with status {done.returncode} and wrote no results")
            return
        counts, failures = results_of(junit)
    line = ", ".join(f"{num} {how}" for how, num in counts.items())
    report.note("tests", counts, f"tests on {report.device}: {line}")
    for failure in failures[:_SHOWN]:
        report.fail(failure)
    if done.returncode and not failures:
        report.fail(f"pytest ended with status {done.returncode}")
    report.note("seconds", time.monotonic() - started)


def pytest_command(device: str) -> list[str]:
    """The command, with the project's settings, but without options of plugins."""
    processes = min(_PROCESSES[device], os.cpu_count() or 1)
    return [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        # Its warning is an error here.
        *("-p", "no:benchmark"),
        *("-p", "without_numba"),
        *("-o", "addopts=--import-mode=importlib", "-m", "not slow and not nightly"),
        *("-n", str(processes), "--dist", "worksteal", "--device", device),
        # torch 2.11 warns of what it uses itself.
        *("-W", "ignore:`torch.jit:DeprecationWarning"),
    ]


def tests_on_a_device(root: Path) -> Iterator[str]:
    """Ids of the tests that take the fixture `device`."""
    for folder in SOME_OF:
        for file in sorted((root / folder).rglob("test_*.py")):
            for name in _TAKES_DEVICE.findall(file.read_text(encoding="utf-8")):
                yield f"{file.relative_to(root)}::{name}"


def results_of(junit: Path) -> tuple[dict[str, int], list[str]]:
    """Tests by how they ended, and a line for each that failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.parse(junit).iter("testcase"):
        problem = next(
            (case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None
        )
        how = "passed" if problem is None else "failed"
        how = "skipped" if case.find("skipped") is not None else how
        counts[how] += 1
        if problem is not None:
            first = (problem.get("message") or "").splitlines() or [""]
            failures.append(f"{case.get('classname')}::{case.get('name')}: {first[0]:.200}")
    return counts, failures


if __name__ == "__main__":
    stage_report.main("tests", stage)
