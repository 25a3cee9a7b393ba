"""Comparisons of two cells: every item counts once, and the counts add up."""

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from run_folders import FULL, NLL, write_run

from kvpolicy.lab.analysis.compare import (
    adjust_p_values,
    compare_by_facet,
    compare_cells,
    compare_compacted,
)
from kvpolicy.lab.analysis.pooling import PooledCell, pool
from kvpolicy.lab.analysis.table import Row, tabulate_runs
from kvpolicy.lab.statistics import paired_proportions
from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.tasks.likelihood import Perplexity
from kvpolicy.lab.tasks.task import ACCURACY, LENGTH, mean_of


def _cells(folder: Path, outcome: Any, **how: Any) -> list[PooledCell]:
    return pool([read_run(write_run(folder, outcome=outcome, **how))])


def _verdicts(table: list[list[bool]]) -> Any:
    """Samples in which the first plan and the others are correct as given, item by item."""

    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        return {"correct": table[0 if cell["budget"] is None else 1][item]}

    return outcome


@given(verdicts=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_counts_equal_a_plain_count(
    verdicts: list[tuple[bool, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    a_right, b_right = [list(side) for side in zip(*verdicts, strict=True)]
    folder = tmp_path_factory.mktemp("run")
    cells = _cells(folder, _verdicts([a_right, b_right]), n=len(verdicts))
    found = compare_cells(cells[0], cells[1], ACCURACY)
    both = only_a = only_b = neither = 0
    for a, b in verdicts:
        both += a and b
        only_a += a and not b
        only_b += b and not a
        neither += not a and not b
    plain = found.to_json()
    assert plain["num_both_right"] == both
    assert plain["num_above"] == only_a
    assert plain["num_below"] == only_b
    assert plain["num_neither_right"] == neither
    assert plain["num_equal"] == both + neither
    assert plain["test"] == "mcnemar"
    chances = sum(math.comb(only_a + only_b, k) for k in range(min(only_a, only_b) + 1))
    assert plain["p_value"] == pytest.approx(min(1, 2 * chances / 2 ** (only_a + only_b)))
    assert found.difference == paired_proportions(both, only_a, only_b, neither)
    assert plain["difference"]["value"] == pytest.approx((only_a - only_b) / len(verdicts))


def test_swapping_the_cells_negates_the_difference(tmp_path: Path) -> None:
    cells = _cells(tmp_path, _verdicts([[True] * 6 + [False] * 2, [True, False] * 4]))
    one, other = (
        compare_cells(cells[0], cells[1], ACCURACY),
        compare_cells(cells[1], cells[0], ACCURACY),
    )
    assert one.difference is not None
    assert other.difference is not None
    assert one.difference.value == -other.difference.value == 0.25
    assert one.p_value == other.p_value
    assert (one.num_above, one.num_below) == (other.num_below, other.num_above) == (3, 1)


def test_only_paired_items_are_compared_and_the_others_are_counted(tmp_path: Path) -> None:
    # The first cell has 8 samples, the second 3, the third none.
    full, some, none = _cells(tmp_path, lambda *_: {}, only_first=11)
    found = compare_cells(full, some, ACCURACY)
    assert len(found.pairs) == 3
    assert (found.a.num_unpaired, found.b.num_unpaired) == (5, 0)
    assert found.a.estimate is not None
    assert found.a.estimate.value == pytest.approx(2 / 3), "over the items that both have"
    nothing = compare_cells(full, none, ACCURACY)
    assert (nothing.difference, nothing.p_value, nothing.b.estimate) == (None, None, None)
    assert (nothing.num_above, nothing.num_below, nothing.num_equal) == (0, 0, 0)
    assert nothing.to_json()["difference"] is None


def test_a_single_item_can_be_compared(tmp_path: Path) -> None:
    full, small, _ = _cells(tmp_path, _verdicts([[True], [False]]), n=1)
    found = compare_cells(full, small, ACCURACY)
    assert found.difference is not None
    assert found.difference == paired_proportions(0, 1, 0, 0)
    assert found.p_value == 1


def test_failed_and_ungraded_samples_are_compared_as_wrong(tmp_path: Path) -> None:
    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        if cell["budget"] is None:
            return {"correct": True}
        if item == 0:
            return {"correct": False, "finish_reason": "error", "error": "too long"}
        return {"correct": None, "ungraded": "no verdict"} if item == 1 else {"correct": True}

    full, small, _ = _cells(tmp_path, outcome)
    found = compare_cells(full, small, ACCURACY)
    assert (found.num_above, found.num_below, len(found.pairs)) == (2, 0, 8)
    plain = found.to_json()["b"]
    assert (plain["num_errors"], plain["num_ungraded"], plain["num_truncated"]) == (1, 1, 0)
    length = compare_cells(full, small, LENGTH)
    assert (len(length.pairs), length.a.num_unpaired) == (7, 1), "what failed has no length"


def test_attempts_are_averaged_and_tested_by_their_sign(tmp_path: Path) -> None:
    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        return {"correct": cell["budget"] is None or attempt <= item % 2}

    full, small, _ = _cells(tmp_path, outcome, attempts=4)
    found = compare_cells(full, small, ACCURACY)
    assert [pair.difference for pair in found.pairs] == [0.75, 0.5] * 4
    assert (found.test, found.num_above) == ("sign", 8)
    assert found.p_value == pytest.approx(2 / 2**8)
    assert found.num_both_right is found.num_neither_right is None


Text = tuple[int, int]  # summed loss, and of how many tokens


def _losses(folder: Path, texts: list[tuple[Text, Text]]) -> list[PooledCell]:
    """A run of two plans over texts: losses under the full cache, and under the other plan."""

    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        loss, length = texts[item][0 if cell["budget"] is None else 1]
        return {"correct": None, "values": {"loss": float(loss), "num_scored": float(length)}}

    plans = (FULL, ("H2O", 64))
    how = {"measure": "perplexity", "columns": [NLL]}
    return _cells(folder, outcome, plans=plans, n=len(texts), **how)


LOSSES = st.tuples(st.integers(0, 50), st.integers(1, 100))


@given(texts=st.lists(st.tuples(LOSSES, LOSSES), min_size=1, max_size=8))
@example(texts=[((30, 10), (20, 10)), ((2000, 1000), (2010, 1000))])
def test_a_difference_is_the_difference_of_both_estimates(
    texts: list[tuple[Text, Text]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    full, small = _losses(tmp_path_factory.mktemp("run"), texts)
    (row,) = [row for row in _rows(full, small) if row.cell.budget is not None]
    sums = [0, 0, 0, 0]
    for (loss, length), (other, its_length) in texts:
        for place, more in enumerate((loss, length, other, its_length)):
            sums[place] += more
    a, b = sums[0] / sums[1], sums[2] / sums[3]
    nll, perplexity = Perplexity().columns
    for column, expected in ((nll, a - b), (perplexity, math.exp(a) - math.exp(b))):
        found = compare_cells(full, small, column)
        assert found.a.estimate is not None
        assert found.b.estimate is not None
        assert found.difference is not None
        sides = found.a.estimate.value - found.b.estimate.value
        assert found.difference.value == sides
        assert sides == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert row.difference == compare_cells(small, full, nll).difference, "tables show the same"


def test_a_short_text_does_not_reverse_a_difference(tmp_path: Path) -> None:
    """A token of ten in the short text is worse, one of a thousand in the long one is better."""
    full, small = _losses(tmp_path, [((30, 10), (20, 10)), ((2000, 1000), (2030, 1000))])
    found = compare_cells(full, small, Perplexity().columns[0])
    assert found.difference is not None
    assert found.difference.value == pytest.approx(2030 / 1010 - 2050 / 1010)
    assert fmean(pair.difference for pair in found.pairs) > 0, "the mean of the texts says more"
    assert (found.test, found.num_above, found.num_below) == ("sign", 1, 1), "texts are counted"


def _rows(*cells: PooledCell) -> list[Row]:
    return tabulate_runs(cells)


def test_tables_and_comparisons_give_the_same_interval(tmp_path: Path) -> None:
    cells = _cells(tmp_path, _verdicts([[True] * 8, [True, False, True] * 2 + [False] * 2]))
    _, *rows = _rows(*cells)
    for cell, row in zip(cells[1:], rows, strict=True):
        assert row.difference == compare_cells(cell, cells[0], ACCURACY).difference
        assert row.difference is not None
        assert row.difference.low < row.difference.value < row.difference.high


def test_seeds_are_compared_each_with_its_own_items(tmp_path: Path) -> None:
    full, small, _ = _cells(tmp_path, lambda *_: {}, seeds=(0, 1, 2))
    assert len(compare_cells(full, small, ACCURACY).pairs) == 24


def test_facets_partition_the_items(tmp_path: Path) -> None:
    full, small, _ = _cells(tmp_path, _verdicts([[True] * 8, [True, False] * 4]))
    whole = compare_cells(full, small, ACCURACY)
    for facet, values in (("depth", [3, 4]), ("kind", ["chains", "sums"])):
        parts = compare_by_facet(whole, facet)
        assert [value for value, _ in parts] == values
        assert sorted(p.item for _, one in parts for p in one.pairs) == list(range(8))
        assert sum(one.num_above for _, one in parts) == whole.num_above == 4
    assert compare_by_facet(whole, "nothing") == []


def test_parts_of_samples_are_compared_with_the_same_parts(tmp_path: Path) -> None:
    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        values = [1.0, float(item)] if cell["budget"] is None else [0.0, 2.0]
        return {"breakdowns": {"layer": {"parts": [3, 11], "values": {"kl": values}}}}

    full, small, _ = _cells(tmp_path, outcome)
    whole = compare_cells(full, small, mean_of("kl", "", ""))
    assert not whole.pairs
    assert [
        (value, [(pair.a, pair.b) for pair in part.pairs])
        for value, part in compare_by_facet(whole, "layer")
    ] == [(3, [(1.0, 0.0)] * 8), (11, [(float(i), 2.0) for i in range(8)])]


def test_facets_count_all_unpaired_items(tmp_path: Path) -> None:
    # The second cell has the first 3 of 8 items; depths take turns, the first four are sums.
    full, some, _ = _cells(tmp_path, lambda *_: {}, only_first=11)
    whole = compare_cells(full, some, ACCURACY)
    for facet, pairs, unpaired in (("depth", [2, 1], [2, 3]), ("kind", [0, 3], [4, 1])):
        parts = [part for _, part in compare_by_facet(whole, facet)]
        assert [len(part.pairs) for part in parts] == pairs
        assert [part.a.num_unpaired for part in parts] == unpaired
        assert sum(part.num_unpaired for part in parts) == whole.num_unpaired == 5


def test_items_with_a_compacted_cache_are_compared_by_themselves(tmp_path: Path) -> None:
    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        if cell["budget"] is None:
            return {"correct": True, "compactions": 0}
        return {"correct": item != 5, "compactions": int(item >= 4)}

    full, small, _ = _cells(tmp_path, outcome)
    found = compare_cells(small, full, ACCURACY)
    part = compare_compacted(found)
    assert [pair.item for pair in part.pairs] == [4, 5, 6, 7]
    assert part.difference == paired_proportions(3, 0, 1, 0)
    assert (found.num_compacted, len(found.pairs)) == (4, 8)
    plain = found.to_json()["compacted"]
    assert (plain["num_items"], plain["a"]["value"], plain["b"]["value"]) == (4, 0.75, 1.0)
    assert plain["difference"]["value"] == -0.25
    never = compare_cells(full, full, ACCURACY).to_json()["compacted"]
    assert never == {"num_items": 0, "a": None, "b": None, "difference": None}


def test_several_comparisons_are_corrected_for_their_number(tmp_path: Path) -> None:
    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        return {"correct": cell["budget"] is None or (cell["budget"] == 64 and item < 2)}

    plans = (("full cache", None), ("H2O", 32), ("H2O", 64), ("H2O", 96))
    full, *others = _cells(tmp_path, outcome, plans=plans, only_first=24)
    found = adjust_p_values([compare_cells(cell, full, ACCURACY) for cell in others])
    assert [one.p_value for one in found[:2]] == pytest.approx([2 / 2**8, 2 / 2**6])
    assert [one.p_holm for one in found[:2]] == pytest.approx([2 * 2 / 2**8, 2 / 2**6])
    assert found[2].p_value is found[2].p_holm is None
