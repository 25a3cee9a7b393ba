"""What evictions of blocks cost beside LRU, `docs/benchmarks/guard_cost.py`."""

import itertools
import json
from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/guard_cost.py")


def test_times_are_those_of_one_request(script: ModuleType) -> None:
    ticks = itertools.count()
    measured = script.measure(10, 2, lambda: 0.001 * next(ticks))
    assert measured.keys() == script.SERIES.keys()
    # Each simulation of 200 requests takes a tick.
    for times in measured.values():
        assert times == pytest.approx([5.0, 5.0])


def test_the_ratio_is_to_lru_of_the_same_round(script: ModuleType) -> None:
    times = {series: [3.0, 6.0, 30.0] for series in script.SERIES}
    times["lru"] = [1.0, 3.0, 10.0]
    assert "| guard | 6.00 (3.0) |" in script.table({1000: times})
    assert "| lru | 3.00 (1.0) |" in script.table({1000: times})


def test_the_script_prints_a_table_and_writes_every_round(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(["--capacities", "8,16", "--rounds", "2", "--json", str(tmp_path / "cost.json")])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "| µs per request | 8 blocks | 16 blocks |"
    assert len(printed) == 2 + len(script.SERIES)
    found = json.loads((tmp_path / "cost.json").read_text())
    assert all(len(times) == 2 for one in found.values() for times in one.values())
