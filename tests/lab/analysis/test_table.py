"""From samples to rows: nothing dropped, nothing made up."""

import csv
import io

import attrs
import pytest
from lab_samples import CELLS, sample

from kvpolicy.lab.analysis.facets import break_down, facet_records
from kvpolicy.lab.analysis.table import Row, tabulate, to_csv, to_json, write_csv
from kvpolicy.lab.statistics import Estimate, mean, wilson
from kvpolicy.lab.store.records import CellTiming
from kvpolicy.lab.tasks.measures import ACCURACY, mean_of

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
    timing = CellTiming(FULL.id, 2, 100, 4.0, 0.5, 2.0, 4096)
    full, small = tabulate(CELLS, [sample(FULL, 0), sample(SMALL, 0)], {FULL.id: timing})
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


def test_what_cannot_be_graded_is_counted_apart_and_is_not_right() -> None:
    samples = [
        sample(SMALL, 0, correct=True),
        sample(SMALL, 1, correct=None, ungraded="no verdict within 20 s"),
        sample(SMALL, 2, correct=False, finish_reason="error", error="too long"),
    ]
    (row,) = tabulate(CELLS, samples, {})
    assert (row.n, row.num_correct, row.num_errors, row.num_ungraded) == (3, 1, 1, 1)
    assert accuracy(row).value == pytest.approx(1 / 3)


def test_attempts_are_counted_by_question() -> None:
    samples = [
        sample(SMALL, item, key=f"{item} {attempt}", attempt=attempt, correct=item == 0)
        for item in (0, 1)
        for attempt in range(4)
    ]
    (row,) = tabulate(CELLS, samples, {})
    assert (row.n, row.num_items, row.num_correct) == (8, 2, 4)
    assert accuracy(row) == wilson(1, 2), "attempts that are alike tell nothing new"


def test_the_difference_of_two_cells_pairs_questions_not_attempts() -> None:
    full = [
        sample(FULL, i, key=f"f{i}{a}", attempt=a, correct=True) for i in (0, 1) for a in (0, 1)
    ]
    small = [sample(SMALL, 0, key=f"s{a}", attempt=a, correct=a == 0) for a in (0, 1)]
    _, row = tabulate(CELLS, [*full, *small], {})
    assert row.difference is not None
    assert row.difference.value == -0.5


MEASURED = (mean_of("kl", "KL", "KL, nats"), mean_of("match", "same", "Same", is_share=True))


def test_a_task_may_measure_what_it_likes() -> None:
    samples = [
        sample(FULL, 0, correct=None, values={"kl": 0.0, "match": 1.0}),
        sample(SMALL, 0, correct=None, values={"kl": 0.5, "match": 0.5}),
        sample(SMALL, 1, correct=None, finish_reason="error", error="too long"),
    ]
    full, small = tabulate(CELLS, samples, {}, MEASURED)
    assert full.num_correct is small.num_correct is None
    assert small.measured["kl"] == Estimate(0.5, 0.5, 0.5)
    assert small.difference == Estimate(0.5, 0.5, 0.5)
    assert (small.n, small.num_errors) == (2, 1)
    header, *_ = to_csv([full, small]).splitlines()
    assert {"kl", "kl_low", "match_high"} <= set(header.split(","))
    assert "accuracy" not in header


def test_facets_hold_every_sample_once_and_say_what_the_whole_says() -> None:
    samples = [
        sample(cell, i, correct=i % 3 == 0, facets={"depth": 1 + i % 2, "kind": "ab"[i % 2]})
        for cell in CELLS
        for i in range(9)
    ]
    rows = break_down(CELLS, samples, (ACCURACY,))
    for facet in ("depth", "kind"):
        for cell in CELLS:
            mine = [r.row for r in rows if r.facet == facet and r.row.plan == cell.digest]
            assert sum(row.n for row in mine) == 9
            assert sum(row.num_correct or 0 for row in mine) == 3
    assert [r.value for r in rows if r.facet == "depth"] == [1, 1, 2, 2]
    lines = list(csv.DictReader(io.StringIO(write_csv(facet_records(rows)))))
    assert [line["value"] for line in lines[-4:]] == ["a", "a", "b", "b"]
    assert float(lines[0]["accuracy"]) == accuracy(rows[0].row).value


def test_means_count_items_and_not_attempts() -> None:
    """Two items, one of them asked nine times as often: each counts once."""
    samples = [
        sample(SMALL, item, key=f"{item} {i}", attempt=i, num_tokens=length, values={"kl": length})
        for item, length, times in ((0, 10, 1), (1, 30, 9))
        for i in range(times)
    ]
    (row,) = tabulate(CELLS, samples, {}, MEASURED)
    assert row.length == row.measured["kl"] == mean([10, 30])
