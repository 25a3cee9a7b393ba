"""Result tables: every sample counts once."""

import csv
import io
import json
from collections.abc import Sequence

import attrs
import pytest
from lab_samples import CELLS, measured, sample

from kvpolicy.lab.analysis.table import Row, break_down, csv_text, tabulate, to_records
from kvpolicy.lab.statistics import Interval, mean, wilson
from kvpolicy.lab.store.records import Breakdown, CellTiming, Sample, structure_record
from kvpolicy.lab.tasks.task import ACCURACY, mean_of

FULL, SMALL = CELLS
NOT_IN_RECORDS = ("cell", "columns", "facet", "facet_value")


def _csv(rows: Sequence[Row]) -> str:
    return csv_text(to_records(rows, flat=True))


def accuracy(row: Row) -> Interval:
    found = row.measured["accuracy"]
    assert found is not None
    return found


def test_a_row_summarises_its_samples() -> None:
    samples = [
        sample(SMALL, 0, correct=True, num_tokens=10, compactions=2, peak_bytes=100),
        sample(SMALL, 1, correct=False, num_tokens=30, finish_reason="length", peak_bytes=300),
        sample(SMALL, 2, correct=True, num_tokens=20, compactions=4, peak_bytes=200),
    ]
    (row,) = tabulate(measured(samples))
    assert (row.cell.series, row.cell.budget, row.n, row.num_correct) == ("small", 16, 3, 2)
    assert accuracy(row).value == pytest.approx(2 / 3)
    assert row.length is not None
    assert row.length.value == 20
    assert row.truncated == pytest.approx(1 / 3)
    assert row.compactions == 2
    assert row.peak_bytes == 300


def test_a_failed_sample_counts_as_wrong() -> None:
    samples = [
        sample(SMALL, 0, correct=True, num_tokens=10),
        sample(SMALL, 1, finish_reason="error", error="too long", num_tokens=0),
    ]
    (row,) = tabulate(measured(samples))
    assert (row.n, row.num_correct, row.num_errors) == (2, 1, 1)
    assert accuracy(row).value == 0.5
    assert row.length is not None
    assert row.length.value == 10, "a sample that failed has no length"


def test_a_cell_of_failures_only_has_no_length() -> None:
    (row,) = tabulate(measured([sample(SMALL, 0, finish_reason="error", error="x")]))
    assert row.length is None
    assert accuracy(row).value == 0
    assert "" in next(csv.DictReader(io.StringIO(_csv([row])))).values()


def test_rows_follow_the_order_of_cells_without_empty_ones() -> None:
    rows = tabulate(measured([sample(SMALL, 0), sample(FULL, 0)]))
    assert [row.cell.series for row in rows] == ["full", "small"]
    assert [row.cell.series for row in tabulate(measured([sample(SMALL, 0)]))] == ["small"]


def test_speed_is_given_only_for_cells_with_a_timing() -> None:
    timing = CellTiming(FULL.id, 2, 100, 4.0, 0.5, 2.0, 4096)
    full, small = tabulate(measured([sample(FULL, 0), sample(SMALL, 0)], {FULL.id: timing}))
    assert (full.throughput_tok_s, full.peak_kv_bytes, full.policy_share) == (25.0, 4096, 0.25)
    assert (small.throughput_tok_s, small.peak_kv_bytes, small.policy_share) == (None, None, None)


def test_json_and_csv_have_the_same_values() -> None:
    rows = tabulate(measured([sample(FULL, 0, correct=True), sample(SMALL, 0)]))
    plain = to_records(rows)
    record = attrs.asdict(rows[0], filter=lambda field, _: field.name not in NOT_IN_RECORDS)
    columns = record.pop("measured")
    plan = {"series": FULL.series, "budget": None, "buffer": None, "plan": FULL.digest}
    plan |= {"bytes_per_sequence": None, "byte_limits": []}
    assert plain[0] == plan | record | columns
    read = list(csv.DictReader(io.StringIO(_csv(rows))))
    for record, line in zip(plain, read, strict=True):
        assert line["series"] == record["series"]
        for name in ("accuracy", "length"):
            assert float(line[name]) == record[name]["value"]
            assert float(line[f"{name}_low"]) == record[name]["low"]
            assert float(line[f"{name}_high"]) == record[name]["high"]
        assert line["throughput_tok_s"] == ""


def test_a_table_without_rows_can_be_written() -> None:
    assert to_records([]) == []
    assert _csv([]) == "\n"


def test_ungraded_samples_are_counted_separately_and_as_wrong() -> None:
    samples = [
        sample(SMALL, 0, correct=True),
        sample(SMALL, 1, correct=None, ungraded="no verdict within 20 s"),
        sample(SMALL, 2, correct=False, finish_reason="error", error="too long"),
    ]
    (row,) = tabulate(measured(samples))
    assert (row.n, row.num_correct, row.num_errors, row.num_ungraded) == (3, 1, 1, 1)
    assert accuracy(row).value == pytest.approx(1 / 3)


def test_samples_whose_cache_was_compacted_are_shown_besides_all() -> None:
    samples = [
        sample(FULL, 0, correct=True),
        *(sample(SMALL, i, correct=i != 3, compactions=i // 2) for i in range(6)),
        sample(SMALL, 6, finish_reason="error", error="too long"),
    ]
    full, small = tabulate(measured(samples))
    assert accuracy(small) == wilson(5, 7)
    assert (small.compacted, small.num_compacted) == (wilson(3, 4), 4)
    assert (full.compacted, full.num_compacted) == (None, 0)
    record = to_records([small])[0]
    assert record["compacted"] == attrs.asdict(wilson(3, 4))
    assert record["num_compacted"] == 4
    line, other = csv.DictReader(io.StringIO(_csv([full, small])))
    assert (line["compacted"], line["compacted_low"], line["num_compacted"]) == ("", "", "0")
    assert float(other["compacted_high"]) == wilson(3, 4).high


def test_attempts_are_counted_by_question() -> None:
    samples = [
        sample(SMALL, item, key=f"{item} {attempt}", attempt=attempt, correct=item == 0)
        for item in (0, 1)
        for attempt in range(4)
    ]
    (row,) = tabulate(measured(samples))
    assert (row.n, row.num_items, row.num_correct) == (8, 2, 4)
    assert accuracy(row) == wilson(1, 2), "attempts that are alike tell nothing new"


def test_the_difference_of_two_cells_pairs_questions_not_attempts() -> None:
    full = [
        sample(FULL, i, key=f"f{i}{a}", attempt=a, correct=True) for i in (0, 1) for a in (0, 1)
    ]
    small = [sample(SMALL, 0, key=f"s{a}", attempt=a, correct=a == 0) for a in (0, 1)]
    _, row = tabulate(measured([*full, *small]))
    assert row.difference is not None
    assert row.difference.value == -0.5


MEASURED = (mean_of("kl", "KL", "KL, nats"), mean_of("match", "same", "Same", is_share=True))


def test_a_task_can_define_its_columns() -> None:
    samples = [
        sample(FULL, 0, correct=None, values={"kl": 0.0, "match": 1.0}),
        sample(SMALL, 0, correct=None, values={"kl": 0.5, "match": 0.5}),
        sample(SMALL, 1, correct=None, finish_reason="error", error="too long"),
    ]
    full, small = tabulate(measured(samples), MEASURED)
    assert full.num_correct is small.num_correct is None
    assert small.measured["kl"] == Interval(0.5, 0.5, 0.5)
    assert small.difference == Interval(0.5, 0.5, 0.5)
    assert (small.n, small.num_errors) == (2, 1)
    header, *_ = _csv([full, small]).splitlines()
    assert {"kl", "kl_low", "match_high"} <= set(header.split(","))
    assert "accuracy" not in header


def test_facets_contain_every_sample_once() -> None:
    samples = [
        sample(cell, i, correct=i % 3 == 0, facets={"depth": 1 + i % 2, "kind": "ab"[i % 2]})
        for cell in CELLS
        for i in range(9)
    ]
    rows = break_down(measured(samples), (ACCURACY,))
    for facet in ("depth", "kind"):
        for cell in CELLS:
            mine = [row for row in rows if (row.facet, row.cell.id) == (facet, cell.id)]
            assert sum(row.n for row in mine) == 9
            assert sum(row.num_correct or 0 for row in mine) == 3
    assert [row.facet_value for row in rows if row.facet == "depth"] == [1, 1, 2, 2]
    lines = list(csv.DictReader(io.StringIO(_csv(rows))))
    assert float(lines[0]["accuracy"]) == accuracy(rows[0]).value
    only = break_down(measured(samples), (ACCURACY,), facets=("kind",))
    assert [row.facet_value for row in only] == ["a", "a", "b", "b"]


def test_parts_of_samples_are_averaged_each_by_itself() -> None:
    samples = [
        sample(
            cell,
            i,
            values={"kl": 1.0},
            facets={"depth": i},
            breakdowns={"layer": Breakdown([0, 1, "rest"], {"kl": [float(i), 3.0, None]})},
        )
        for cell in CELLS
        for i in range(4)
    ]
    stored = [
        structure_record(Sample, json.loads(json.dumps(attrs.asdict(s))), "") for s in samples
    ]
    assert stored == samples
    rows = [row for row in break_down(measured(stored), MEASURED) if row.facet == "layer"]
    assert [row.facet_value for row in rows] == [0, 0, 1, 1, "rest", "rest"]
    assert [row.measured["kl"] for row in rows] == [
        *[mean([0, 1, 2, 3])] * 2,
        *[mean([3] * 4)] * 2,
        *[None] * 2,
    ]
    assert all(row.n == 4 for row in rows)
    by_depth = break_down(measured(stored), MEASURED, facets=("depth",))
    assert {row.measured["kl"] for row in by_depth} == {mean([1])}


def test_means_count_items_and_not_attempts() -> None:
    """Two items, one of them asked nine times as often: each counts once."""
    samples = [
        sample(SMALL, item, key=f"{item} {i}", attempt=i, num_tokens=length, values={"kl": length})
        for item, length, times in ((0, 10, 1), (1, 30, 9))
        for i in range(times)
    ]
    (row,) = tabulate(measured(samples), MEASURED)
    assert row.length == mean([10, 30], least=0)
    assert row.measured["kl"] == mean([10, 30])
