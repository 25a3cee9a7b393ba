"""Cells: every series at every budget, and what an override changes."""

import re
from pathlib import Path

import pytest

from kvpolicy.errors import BudgetError, PlanError, UnknownPolicyError
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.sweep_file import Series, Variant


def cells(*series: Series, budgets: list[int], overrides: list[str] | None = None) -> list[Cell]:
    return build_cells(series, num_layers=3, budgets=budgets, buffer=8, overrides=overrides or [])


def points(found: list[Cell]) -> list[tuple[str, float | None]]:
    return [(cell.series, cell.budget) for cell in found]


def test_every_series_runs_at_every_budget() -> None:
    found = cells(Series.from_stack("h2o"), Series.from_stack("rkv"), budgets=[32, 16])
    assert points(found) == [("h2o", 32), ("h2o", 16), ("rkv", 32), ("rkv", 16)]
    assert len({cell.digest for cell in found}) == 4


def test_a_plan_without_evictions_is_one_cell_at_any_budgets() -> None:
    found = cells(Series.from_stack("full"), budgets=[32, 16])
    other = cells(Series.from_stack("full"), budgets=[99])
    assert points(found) == [("full", None)]
    assert found[0].digest == other[0].digest


def test_a_policy_that_compacts_the_prompt_only_still_has_a_budget() -> None:
    series = Series("once", {"stack": [{"policy": "snapkv", "phase": "prefill"}]})
    assert points(cells(series, budgets=[32, 16])) == [("once", 32), ("once", 16)]


def test_a_stack_is_written_with_plus_signs() -> None:
    found = cells(Series.from_stack("h2o + protect"), budgets=[32])[0]
    assert [spec.policy for spec in found.resolved.layers[0].stack] == ["h2o", "protect"]


def test_a_plan_with_its_own_budget_is_run_at_that(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('budget = 24\nstack = ["h2o"]\n', encoding="utf-8")
    assert points(cells(Series.from_file(path), budgets=[32, 16])) == [("mine", 24)]


def test_a_plan_with_several_groups_has_their_mean_budget(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[layers]]\nwhere = [0]\nstack = ["full"]\n'
        '[[layers]]\nwhere = [1]\nstack = ["h2o"]\nbudget = 20\n'
        '[[layers]]\nwhere = [2]\nstack = ["rkv"]\nbudget = 30\n',
        encoding="utf-8",
    )
    assert points(cells(Series.from_file(path), budgets=[32, 16])) == [("mine", 25)]


def test_the_same_plan_under_two_names_is_run_once() -> None:
    found = cells(Series.from_stack("h2o"), Series("other", {"stack": ["h2o"]}), budgets=[32])
    assert points(found) == [("h2o", 32)]


def test_an_override_applies_to_the_series_that_use_its_policy() -> None:
    series = [Series.from_stack("h2o"), Series.from_stack("rkv")]
    before = cells(*series, budgets=[32])
    after = cells(*series, budgets=[32], overrides=["rkv.mix_lambda=0.5"])
    assert after[0].digest == before[0].digest
    assert after[1].resolved.layers[0].stack[0].knobs["mix_lambda"] == 0.5


def test_an_override_applies_to_the_series_that_mix_its_policy() -> None:
    mixed = Series("mixed", {"stack": [{"policy": "mix", "of": ["streaming", "rkv"]}]})
    before = cells(mixed, Series.from_stack("h2o"), budgets=[32])
    after = cells(mixed, Series.from_stack("h2o"), budgets=[32], overrides=["rkv.mix_lambda=0.5"])
    assert after[0].resolved.layers[0].stack[0].knobs["of"][1]["mix_lambda"] == 0.5
    assert before[0].digest != after[0].digest
    assert before[1].digest == after[1].digest


def test_a_larger_buffer_of_prompts_is_an_axis_and_a_full_cache_has_none() -> None:
    series = [Series.from_stack(name) for name in ("full", "h2o")]
    tried = [Variant(64, {"prefill_buffer": size}) for size in (32, 160)]
    found = build_cells(series, num_layers=2, variants=tried, buffer=32)
    assert [(one.series, one.resolved.layers[0].prefill_buffer) for one in found] == [
        ("full", None),
        ("h2o, prefill_buffer=32", None),
        ("h2o, prefill_buffer=160", 160),
    ]
    given = build_cells(series, num_layers=2, budgets=[64], buffer=32, prefill_buffer=160)
    assert [one.digest for one in given] == [found[0].digest, found[2].digest]


def test_an_override_of_the_buffer_applies_to_all() -> None:
    found = cells(Series.from_stack("h2o"), budgets=[32], overrides=["buffer=5"])
    assert found[0].buffer == 5


@pytest.mark.parametrize(
    ("stack", "overrides", "error", "message"),
    [
        ("h2o", ["snapkv.window_size=4"], PlanError, "snapkv"),
        ("h2o", ["budget=9"], PlanError, "--budgets"),
        ("h2o", ["nonsense"], PlanError, "nonsense"),
        ("h20", [], UnknownPolicyError, "h2o"),
        ("h2o+", [], UnknownPolicyError, "''"),
        ("snapkv", ["snapkv.window_size=64"], BudgetError, "64"),
    ],
)
def test_overrides_and_policies_that_do_not_fit_are_refused(
    stack: str, overrides: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        cells(Series.from_stack(stack), budgets=[32], overrides=overrides)
