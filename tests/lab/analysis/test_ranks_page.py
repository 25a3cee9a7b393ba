"""Rank correlations of two measurements, budget by budget, with a bootstrap over examples."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from run_folders import write_run
from scripts import load_script

from kvpolicy.lab.analysis.pooling import PooledCell, pool
from kvpolicy.lab.analysis.select import open_runs

SERIES = ("A", "B", "C", "D")
N = 20
# Of twenty, how many each series solves; the second model ranks D second and is better overall.
FIRST = {"A": 2, "B": 6, "C": 10, "D": 14}
SECOND = {"A": 8, "B": 10, "C": 18, "D": 16}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loaded = load_script("benchmarks/ranks.py")
    loaded.RESAMPLES = 50  # a thousand take seconds
    return loaded


def write(folder: Path, model: str, right: dict[str, int], budgets: tuple[int, int]) -> Path:
    """At the larger budget, every series solves two more."""

    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        if cell["budget"] is None:
            return {"correct": True}
        more = 2 * (cell["budget"] == budgets[1])
        return {"correct": item < right[cell["series"]] + more}

    plans = (("full", None), *((one, budget) for one in SERIES for budget in budgets))
    return write_run(folder, models=(model,), plans=plans, n=N, outcome=outcome)


@pytest.fixture
def cells(tmp_path: Path) -> list[PooledCell]:
    folders = [
        write(tmp_path / "first", "first", FIRST, (64, 96)),
        write(tmp_path / "second", "second", SECOND, (100, 200)),
        write(tmp_path / "third", "third", {one: 16 - FIRST[one] for one in SERIES}, (5, 6)),
    ]
    return pool(open_runs(list(map(str, folders)), warn=print))


def by_hand(a: dict[str, int], b: dict[str, int]) -> tuple[float, float]:
    """Kendall's tau and Spearman's rho where nothing is tied."""
    pairs = [(x, y) for i, x in enumerate(SERIES) for y in SERIES[i + 1 :]]
    agree = sum(1 if (a[x] - a[y]) * (b[x] - b[y]) > 0 else -1 for x, y in pairs)
    ranks = [[sorted(one.values()).index(one[x]) for x in SERIES] for one in (a, b)]
    squares = sum((x - y) ** 2 for x, y in zip(*ranks, strict=True))
    n = len(SERIES)
    return agree / len(pairs), 1 - 6 * squares / (n * (n**2 - 1))


def test_ranks_are_compared_budget_by_budget(script: ModuleType, cells: list[PooledCell]) -> None:
    found = {one.quantity.model: one for one in script.correlations(cells, "first", "reasoner")}
    assert found.keys() == {"second", "third"}
    second = found["second"]
    assert second.num_series == len(SERIES)
    kendall, spearman = by_hand(FIRST, SECOND)
    assert second.kendall[0] == pytest.approx(kendall)
    assert second.spearman[0] == pytest.approx(spearman)
    assert found["third"].kendall[0] == pytest.approx(-1)
    for value, low, high in (second.kendall, second.spearman):
        assert -1 <= low <= value <= high <= 1


def test_interval_is_narrow_where_examples_leave_no_doubt(
    script: ModuleType, tmp_path: Path
) -> None:
    far = {"A": 0, "B": 6, "C": 12, "D": 18}
    folders = [write(tmp_path / name, name, far, (1, 2)) for name in ("one", "two")]
    (found,) = script.correlations(
        pool(open_runs(list(map(str, folders)), warn=print)), "one", "reasoner"
    )
    assert found.kendall == (1, pytest.approx(1), 1)


def test_error_counts_negatively(script: ModuleType) -> None:
    import numpy as np

    accuracy = np.array([[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]])
    first = script.Quantity("m", "t", "accuracy", ("A", "B", "C"), (accuracy,))
    other = script.Quantity("m", "u", "output_error", ("C", "B", "A"), (accuracy,))
    assert script.correlate(first, other, first.series).kendall[0] == 1


def test_budgets_are_chosen_whichever_model_has_them(script: ModuleType, tmp_path: Path) -> None:
    folders = [
        str(write(tmp_path / name, name, FIRST, budgets))
        for name, budgets in (("one", (10, 20)), ("two", (20, 30)))
    ]
    cells = script.read(folders, {20.0})
    (found,) = script.correlations(cells, "one", "reasoner")
    assert len(found.quantity.values) == 1
    assert len(list(script.correlations(script.read(folders), "one", "reasoner"))) == 1


def test_reference_that_is_not_there_is_refused(
    script: ModuleType, cells: list[PooledCell]
) -> None:
    with pytest.raises(SystemExit, match="second reasoner"):
        list(script.correlations(cells, "fourth", "reasoner"))


def test_table_has_a_row_for_each_quantity(
    script: ModuleType, cells: list[PooledCell], capsys: pytest.CaptureFixture[str]
) -> None:
    script.print_table(list(script.correlations(cells, "first", "reasoner")))
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows] == ["| second", "| third"]
