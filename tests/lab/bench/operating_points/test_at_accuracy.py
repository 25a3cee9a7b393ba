"""Budgets at an accuracy: the smallest one whose whole interval is within the margin."""

from pathlib import Path
from typing import Any

import pytest
from run_folders import FULL, write_run
from shell import Shell, refusal

from kvpolicy.errors import ResultsError
from kvpolicy.lab.analysis.compare import compare_cells
from kvpolicy.lab.analysis.pooling import pool
from kvpolicy.lab.bench.operating_points.at_accuracy import choose_budgets
from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.tasks.task import ACCURACY

N = 400
BUDGETS = (64, 96, 128)
PLANS = (FULL, *(("H2O", budget) for budget in BUDGETS))


def losing(wrong: dict[float | None, int], compacted: int = N) -> Any:
    """The first answers of a budget are wrong; the first caches are compacted."""

    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        is_compacted = cell["budget"] is not None and item < compacted
        return {"correct": item >= wrong.get(cell["budget"], 0), "compactions": int(is_compacted)}

    return outcome


def choices(folder: Path, margin: float, **how: Any) -> Any:
    return choose_budgets(pool([read_run(write_run(folder, n=N, **how))]), margin)


def test_the_smallest_budget_within_the_margin_is_chosen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plans=PLANS, n=N, outcome=losing({64: 60, 96: 3, 128: 0}))
    cells = pool([read_run(run)])
    (found,) = choose_budgets(cells, 0.05)
    assert (found.series, found.budget, found.num_compacted) == ("H2O", 96, N)
    by_budget = {cell.budget: cell for cell in cells}
    expected = compare_cells(by_budget[96], by_budget[None], ACCURACY).difference
    assert found.difference == expected
    assert expected is not None
    assert expected.low > -0.05
    assert found.accuracy is not None
    assert found.accuracy.value == pytest.approx(1 - 3 / N)
    assert found.plan is not None
    assert found.plan.plan == {"stack": [{"policy": "h2o"}], "budget": 96, "buffer": 16}
    # The interval counts, not the value: 3 of 400 are less than 1 %, and it reaches below.
    assert expected.low < -0.01 < expected.value
    (strict,) = choose_budgets(cells, 0.01)
    assert strict.budget == 128
    (wide,) = choose_budgets(cells, 0.5)
    assert wide.budget == 64


def test_a_budget_that_evicts_nothing_is_not_chosen(tmp_path: Path) -> None:
    (found,) = choices(tmp_path / "run", 0.05, plans=PLANS, outcome=losing({}, compacted=0))
    assert (found.budget, found.plan, found.num_compacted) == (None, None, 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"plans": [("H2O", 64)]}, "0 plans without a budget"),
        ({"plans": [FULL]}, "no plan with a budget"),
        ({"models": ["a", "b"]}, "2 combinations of model, task and version"),
    ],
)
def test_sweeps_without_a_comparison_are_refused(
    tmp_path: Path, how: dict[str, Any], message: str
) -> None:
    with pytest.raises(ResultsError, match=message):
        choices(tmp_path / "run", 0.02, **how)


@pytest.mark.nightly
@pytest.mark.usefixtures("little_work_for_the_limit")
def test_the_command_runs_the_chosen_budgets(kvpolicy: Shell, tmp_path: Path) -> None:
    wrong = {16: 200, 24: 0}
    plans = (FULL, ("H2O", 16), ("H2O", 24), ("Knorm", 16))
    run = write_run(tmp_path / "run", plans=plans, n=N, outcome=losing(wrong))
    arguments = ("--shape", "tiny", "--batch", 2, "--rounds", 1, "--lengths", "60,90")
    without = ("--without", "generate_batch,kvpress")
    sweep = ("--at-accuracy", 0.02, "--sweep", run)
    found = kvpolicy("bench", *arguments, *without, *sweep, "--json")
    assert found.status == 0, found.err
    chosen = {one["series"]: one["budget"] for one in found.json["choices"]}
    assert chosen == {"H2O": 24, "Knorm": None}
    mine = [one for one in found.json["standings"] if one["budget"] == 24]
    assert [(one["name"], one["held"]) for one in mine] == [("H2O@24", 60), ("H2O@24", 90)]
    assert all(one["compactions"] == 4 for one in mine), "two sequences, two layers"
    plain = kvpolicy("bench", *arguments, *without, *sweep)
    for word in ("2.0% below the full cache", "none found", "400 of 400", "H2O@24"):
        assert word in plain.out
    message = refusal(kvpolicy("bench", *arguments, "--at-accuracy", 0.0, "--sweep", run))
    assert "; H2O may lose 1.0%: " in message
    assert "larger budgets or more items" in message
