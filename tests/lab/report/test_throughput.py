"""Throughput has an interval over seeds, and none for one seed."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import write_lines, write_run

from kvpolicy.lab.report.gather import gather, pooled
from kvpolicy.lab.report.metrics import quantities, throughput
from kvpolicy.lab.statistics import Interval
from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.store.records import CellTiming

PLANS = [("full cache", None), ("H2O", 64)]


# Student's t for 95 % and 1 to 7 degrees of freedom, from a printed table.
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646)


def timing(new_tokens: int, elapsed_s: float) -> CellTiming:
    return CellTiming("cell", 8, new_tokens, elapsed_s, 0.1, 1.0, 1 << 20)


@given(st.lists(st.floats(0.5, 50), min_size=2, max_size=8))
def test_throughput_has_students_interval_over_equal_seeds(speeds: list[float]) -> None:
    """If all take as long, the speed of all is the mean of their speeds."""
    found = throughput([timing(round(1000 * speed), 1000.0) for speed in speeds])
    assert isinstance(found, Interval)
    n, rounded = len(speeds), [round(1000 * speed) / 1000 for speed in speeds]
    mean = sum(rounded) / n
    error = math.sqrt(sum((one - mean) ** 2 for one in rounded) / (n - 1) / n)
    assert found.value == pytest.approx(mean)
    half = STUDENT[n - 2] * error
    assert found.high == pytest.approx(mean + half, rel=1e-4)
    assert found.low == pytest.approx(max(0.0, mean - half), rel=1e-4, abs=1e-4 * half)


def test_equal_seeds_have_an_interval_without_width() -> None:
    found = throughput([timing(600, 3.0), timing(200, 1.0)])
    assert found == Interval(200.0, pytest.approx(200.0), pytest.approx(200.0))


def test_a_report_has_the_interval_for_pooled_seeds(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", plans=PLANS, seeds=(0, 1, 2), n=4)
    lines = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):  # two cells of each seed
        line |= {"new_tokens": 100 + 10 * i, "elapsed_s": 1.0}
    write_lines(folder / "timings.jsonl", lines)
    run = read_run(folder)
    of_name = {one.name: one for one in quantities(next(iter(run.groups.values())))}
    together, *single = gather([run])
    for cell in single[0].cells:
        assert isinstance(of_name["throughput"].estimate(cell), float)
    for number, cell in enumerate(together.cells):
        found = of_name["throughput"].estimate(cell)
        assert isinstance(found, Interval)
        assert found.value == pytest.approx(120 + 10 * number)
        half = 4.3027 * 20 / math.sqrt(3)  # seeds differ by 20
        ends = (found.value - half, found.value + half)
        assert (found.low, found.high) == pytest.approx(ends, rel=1e-4)
    (drawn,) = pooled([run])
    assert isinstance(of_name["throughput"].estimate(drawn.cells[0]), Interval)
    # A seed that was interrupted leaves the cell without a throughput.
    write_lines(folder / "timings.jsonl", lines[1:])
    first, other = gather([read_run(folder)])[0].cells
    assert of_name["throughput"].estimate(first) is None
    assert isinstance(of_name["throughput"].estimate(other), Interval)
