"""From samples to rows: nothing dropped, nothing made up."""

import csv
import io

import attrs
import pytest
from lab_samples import CELLS, sample

from kvpolicy.lab.samples import CellTiming
from kvpolicy.lab.stats import Estimate
from kvpolicy.lab.table import Row, tabulate, to_csv, to_json

FULL, SMALL = CELLS


def accuracy(row: Row) -> Estimate:
    found = row.measured["accuracy"]
    assert found is not None
    return found


def test_a_row_counts_what_its_samples_say() -> None:
    samples = [
        sample(SMALL, 0, correct=True, num_tokens=10, compactions=2, peak_bytes=100),
        sample(SMALL, 1, correct=False, num_tokens=30, finish_reason="length", peak_bytes=300),
        sample(SMALL, 2, correct=True, num_tokens=20, compactions=4, peak_bytes=200),
    ]
    (row,) = tabulate(CELLS, samples, {})
    assert (row.series, row.budget, row.n, row.num_correct) == ("small", 16, 3, 2)
    assert accuracy(row).value == pytest.approx(2 / 3)
    assert row.length is not None
    assert row.length.value == 20
    assert row.truncated == pytest.approx(1 / 3)
    assert row.compactions == 2
    assert row.peak_bytes == 300


def test_a_failed_sample_stays_in_the_count_and_is_not_right() -> None:
    samples = [
        sample(SMALL, 0, correct=True, num_tokens=10),
        sample(SMALL, 1, finish_reason="error", error="too long", num_tokens=0),
    ]
    (row,) = tabulate(CELLS, samples, {})
    assert (row.n, row.num_correct, row.num_errors) == (2, 1, 1)
    assert accuracy(row).value == 0.5
    assert row.length is not None
    assert row.length.value == 10, "a sample that failed has no length"


def test_a_cell_of_failures_only_has_no_length() -> None:
    (row,) = tabulate(CELLS, [sample(SMALL, 0, finish_reason="error", error="x")], {})
    assert row.length is None
    assert accuracy(row).value == 0
    assert "" in next(csv.DictReader(io.StringIO(to_csv([row])))).values()


def test_rows_come_in_the_order_of_the_cells_and_empty_cells_have_none() -> None:
    rows = tabulate(CELLS, [sample(SMALL, 0), sample(FULL, 0)], {})
    assert [row.series for row in rows] == ["full", "small"]
    assert [row.series for row in tabulate(CELLS, [sample(SMALL, 0)], {})] == ["small"]


def test_speed_is_told_only_of_cells_that_were_run_in_one_go() -> None:
    timing = CellTiming(FULL.digest, 2, 100, 4.0, 0.5, 2.0, 4096)
    full, small = tabulate(CELLS, [sample(FULL, 0), sample(SMALL, 0)], {FULL.digest: timing})
    assert (full.throughput_tok_s, full.peak_kv_bytes, full.policy_share) == (25.0, 4096, 0.25)
    assert (small.throughput_tok_s, small.peak_kv_bytes, small.policy_share) == (None, None, None)


def test_json_and_csv_say_the_same() -> None:
    rows = tabulate(CELLS, [sample(FULL, 0, correct=True), sample(SMALL, 0)], {})
    plain = to_json(rows)
    record = attrs.asdict(rows[0])
    measured = record.pop("measured")
    assert plain[0] == record | measured
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    for record, line in zip(plain, read, strict=True):
        assert line["series"] == record["series"]
        for name in ("accuracy", "length"):
            assert float(line[name]) == record[name]["value"]
            assert float(line[f"{name}_low"]) == record[name]["low"]
            assert float(line[f"{name}_high"]) == record[name]["high"]
        assert line["throughput_tok_s"] == ""


def test_a_table_without_rows_can_be_written() -> None:
    assert to_json([]) == []
    assert to_csv([]) == "\n"
