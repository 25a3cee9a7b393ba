"""The gate of CI: each failure of every stage is named, and run again alone."""

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GATE = Path(__file__).parents[2] / ".ci" / "gate.py"
TESTS = """
import pathlib, time, pytest

def test_right(): pass

class TestGrouped:
    @pytest.mark.parametrize("x", ["a b", "c/d"])
    def test_wrong(self, x):
        assert x == "a b", "it differs"

def test_right_the_second_time():
    seen = pathlib.Path("seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there

@pytest.mark.slow
def test_left_out(): assert False

@pytest.mark.skip(reason="no such thing")
def test_skipped(): pass

def test_hangs():
    time.sleep(600)
"""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", "-n", "0")


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location("gate", GATE)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gate", module)  # dataclasses look there
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longest to start
    spec.loader.exec_module(module)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_some.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "tests/test_broken.py").write_text("import not_there\n", encoding="utf-8")
    markers = '[pytest]\naddopts = -m "not slow"\nmarkers = slow\n'
    (tmp_path / "pytest.ini").write_text(markers, encoding="utf-8")
    return module


@pytest.mark.slow
def test_all_stages_run_and_every_failure_is_named(gate: ModuleType, tmp_path: Path) -> None:
    some = "tests/test_some.py"
    quick = (*PYTEST, "-k", "not hangs")
    stages = [
        gate.Stage("tests", lambda run: run.pytest(*quick, tests=[some])),
        gate.Stage("a command", lambda run: run.run(sys.executable, "-c", "print('so'); 1 / 0")),
        gate.Stage("no such program", lambda run: run.run("no-such-program")),
        gate.Stage("a mistake", lambda run: 1 / 0),
        gate.Stage("an import", lambda run: run.pytest(*PYTEST, tests=["tests/test_broken.py"])),
        gate.Stage("nothing", lambda run: run.pytest("bash", "-c", "exit 5")),  # pytest's status
        gate.Stage(
            "skipping", lambda run: run.pytest(*PYTEST, "-k", "skip", tests=[some], may_skip=False)
        ),
        gate.Stage("good", lambda run: run.run("true")),
    ]
    run = gate.Gate(tmp_path, tmp_path)
    for stage in stages:
        run.run_stage(stage)
    run.rerun_failures()
    found = [(failure.stage.name, failure.name, failure.passes_alone) for failure in run.failures]
    assert found[:2] == [
        ("tests", f"{some}::TestGrouped::test_wrong[c/d]", False),
        ("tests", f"{some}::test_right_the_second_time", True),
    ]
    assert [stage for stage, *_ in found[2:]] == [stage.name for stage in stages[1:-1]]
    assert ("an import", "tests/test_broken.py", False) in found
    assert run.failures[0].error == "AssertionError: it differs"
    assert run.counts == {"passed": 2, "failed": 3, "skipped": 2}
    assert run.has_failed
    assert all(name in run.summary() for _, name, _ in found)


@pytest.mark.slow
def test_a_test_that_hangs_is_named_and_the_others_run(gate: ModuleType, tmp_path: Path) -> None:
    run = gate.Gate(tmp_path, tmp_path, hangs_after_s=3.0)
    tests = ["tests/test_some.py"]
    run.run_stage(gate.Stage("tests", lambda run: run.pytest(*PYTEST, tests=tests)))
    names = [failure.name.rpartition("::")[2] for failure in run.failures]
    assert names == ["test_wrong[c/d]", "test_right_the_second_time", "test_hangs"]
    assert "Timeout" in run.failures[-1].error


def test_chains_next_to_each_other_run_side_by_side(
    gate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "NUM_CORES", 2)
    run = gate.Gate(tmp_path, tmp_path)

    def meet(mine: str, other: str) -> Callable[[Any], object]:
        waits = f"touch {mine}; until [ -e {other} ]; do sleep 0.05; done; echo met"
        return lambda run: run.run("bash", "-c", waits)

    def sees(test: str) -> Callable[[Any], object]:
        return lambda run: run.run("bash", "-c", test)

    stages = [
        gate.Stage("before", sees("[ ! -e a ] && [ ! -e b ]")),
        gate.Stage("first of a", meet("a", "b"), chain="a"),
        gate.Stage("second of a", lambda run: run.run("false"), chain="a"),
        gate.Stage("first of b", meet("b", "a"), chain="b"),
        gate.Stage("after", sees("[ -e a ] && [ -e b ]")),
    ]
    run.run_stages(stages)
    assert [failure.stage.name for failure in run.failures] == ["second of a"]
    names = [line.split("  ")[-1] for line in run.summary().splitlines() if " s  " in line]
    assert (names[0], names[-1]) == ("before", "after")
    assert names.index("first of a") < names.index("second of a")
    assert sorted(names) == sorted(stage.name for stage in stages)


@pytest.mark.nightly
def test_a_stage_that_hangs_is_ended_and_what_failed_before_is_kept(
    gate: ModuleType, tmp_path: Path
) -> None:
    run = gate.Gate(tmp_path, tmp_path)
    command = (*PYTEST, "-k", "not second", "tests/test_some.py")
    run.run_stage(gate.Stage("tests", lambda run: run.pytest(*command), minutes=0.5))
    names = [failure.name for failure in run.failures]
    assert names[0] == "tests/test_some.py::TestGrouped::test_wrong[c/d]"
    assert len(names) == 2
