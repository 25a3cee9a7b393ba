"""Throughput has the range over seeds, and none for one seed."""

import json
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


def timing(new_tokens: int, elapsed_s: float) -> CellTiming:
    return CellTiming("cell", 8, new_tokens, elapsed_s, 0.1, 1.0, 1 << 20)


@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(0.5, 50)), min_size=2, max_size=8))
def test_throughput_has_the_range_over_seeds(seeds: list[tuple[int, float]]) -> None:
    found = throughput([timing(*seed) for seed in seeds])
    assert isinstance(found, Interval)
    rates = [tokens / seconds for tokens, seconds in seeds]
    whole = sum(tokens for tokens, _ in seeds) / sum(seconds for _, seconds in seeds)
    assert found.value == pytest.approx(whole)
    assert (found.low, found.high) == (min(rates), max(rates))


def test_a_report_has_the_range_for_pooled_seeds(tmp_path: Path) -> None:
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
        assert (found.low, found.high) == (100 + 10 * number, 140 + 10 * number)
    (drawn,) = pooled([run])
    assert isinstance(of_name["throughput"].estimate(drawn.cells[0]), Interval)
    # A seed that was interrupted leaves the cell without a throughput.
    write_lines(folder / "timings.jsonl", lines[1:])
    first, other = gather([read_run(folder)])[0].cells
    assert of_name["throughput"].estimate(first) is None
    assert isinstance(of_name["throughput"].estimate(other), Interval)
