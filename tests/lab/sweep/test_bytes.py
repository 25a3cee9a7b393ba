"""Sweeps by bytes: the largest budget that fits, for every series and precision."""

import re
from pathlib import Path

import attrs
import pytest
from lab_samples import sample
from lab_sweeps import BASE, Catalogue, built

from kvpolicy.errors import BudgetError, KVPolicyError
from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.analysis.select import find_cell, pairs_with, select
from kvpolicy.lab.models import Lengths, ModelCache
from kvpolicy.lab.store.read import RunFolder, run_folder
from kvpolicy.lab.store.records import EvalSettingRecord
from kvpolicy.lab.sweep.grid import Cell, Sweep
from kvpolicy.lab.sweep.prepare import build_sweep, load_sweep
from kvpolicy.lab.sweep.sweep_file import Series, load_preset
from kvpolicy.plan.plan import Plan

pytestmark = pytest.mark.needs_reasoner

# The tests' models have 2 layers, which take 100 bytes for a row, or 20 in integers.
PLAIN, INTEGERS = 200, 40
FULL, H2O = Series.from_stack("full"), Series.from_stack("h2o")
ROWS = {"rows": ("model", "int8", "int8/int4")}


def by_bytes(*limits: int, **changes: object) -> Sweep:
    given = {"series": (FULL, H2O), "budgets": (), "bytes": limits, **changes}
    return built(**given)


def found(sweep: Sweep) -> list[tuple[str, float | None, int | None, tuple[int, ...]]]:
    return [
        (cell.series, cell.budget, cell.bytes_per_sequence, cell.byte_limits)
        for cell in sweep.cells
    ]


def longest(sweep: Sweep) -> int:
    prompts = [one.prompt for setting in sweep.settings for one in setting.examples]
    return max(map(len, prompts)) + sweep.settings[0].max_new_tokens


def test_each_series_has_the_largest_budget_that_fits_in_each_precision() -> None:
    sweep = by_bytes(30 * PLAIN, 40 * PLAIN, knobs=ROWS, buffer=8)
    full = longest(sweep)
    for (name, budget, num_bytes, limits), cell in zip(found(sweep), sweep.cells, strict=True):
        row = PLAIN if name.endswith("=model") else INTEGERS
        if budget is None:
            assert num_bytes == full * row
            assert limits == tuple(one for one in (6000, 8000) if one >= full * row)
        else:
            (limit,) = limits
            assert num_bytes == min(budget + 8, full) * row <= limit
            assert budget == full or limit < (budget + 9) * row
        assert cell.knobs["rows"] in name
    assert {cell.series for cell in sweep.cells} == {
        f"{name}, rows={rows}" for name in ("full", "h2o") for rows in ROWS["rows"]
    }


def test_a_plan_that_two_numbers_of_bytes_give_is_one_cell_of_both() -> None:
    sweep = by_bytes(30 * PLAIN, 30 * PLAIN + 3, series=(H2O,))
    assert found(sweep) == [("h2o", 22, 6000, (6000, 6003))]


def test_more_bytes_than_the_longest_sequence_takes_evict_nothing() -> None:
    sweep = by_bytes(10**6, series=(H2O,))
    assert [cell.budget for cell in sweep.cells] == [longest(sweep)]


def test_seeds_share_their_plans_whatever_the_lengths_of_their_prompts() -> None:
    sweep = by_bytes(30 * PLAIN, 10**6, seeds=(0, 1, 2), n=3)
    assert len(sweep.settings) == 3
    assert len({cell.digest for cell in sweep.cells}) == 3
    assert len({cell.bytes_per_sequence for cell in sweep.cells if cell.budget is None}) == 1


def test_too_few_bytes_are_refused_with_the_least_that_work_for_all_series() -> None:
    wide = Series("wide", {"stack": [{"policy": "protect", "n_sink": 4, "n_recent": 9}, "h2o"]})
    with pytest.raises(BudgetError, match="least") as refused:
        by_bytes(200, series=(H2O, wide))
    least = max(int(one.replace(",", "")) for one in re.findall(r"[\d,]*\d", str(refused.value)))
    assert by_bytes(least, series=(H2O, wide)).cells
    with pytest.raises(BudgetError):
        by_bytes(least - 1, series=(H2O, wide))


def test_budgets_and_bytes_are_one_or_the_other(tmp_path: Path) -> None:
    with pytest.raises(KVPolicyError, match="--budgets and --bytes"):
        load_sweep(None, budgets=(64,), bytes=(4096,))
    assert load_sweep(None, bytes=(4096,)).budgets == ()
    path = tmp_path / "mine.toml"
    text = 'model = "a"\ntask = "reasoner"\nbytes = ["4KiB", 5000]\npolicies = "full"\n'
    path.write_text(f'{text}rows = ["model", {{ keys = "int8", values = "int4" }}]\n')
    read = load_preset(str(path))
    assert (read.bytes, read.knobs["rows"]) == (
        (4096, 5000),
        ("model", {"keys": "int8", "values": "int4"}),
    )
    assert load_sweep(str(path), budgets=(64,)).bytes == ()
    for line in ("budgets = 64", 'knobs = { rows = ["int8"] }'):
        path.write_text(f'{text}rows = "int8"\n{line}\n')
        with pytest.raises(KVPolicyError, match="both"):
            load_preset(str(path))
    path.write_text(text.replace("5000", "true"))
    with pytest.raises(KVPolicyError, match="whole number"):
        load_preset(str(path))


def test_numbers_of_bytes_are_zipped_like_budgets() -> None:
    sweep = by_bytes(
        30 * PLAIN, 9 * PLAIN, series=(H2O,), knobs={"rows": ("model", "int8")}, combine="zip"
    )
    assert found(sweep) == [
        ("h2o, rows=model", 22, 6000, (6000,)),
        ("h2o, rows=int8", 37, 1800, (1800,)),
    ]


@pytest.mark.slow
def test_bytes_are_those_that_the_engine_allocates() -> None:
    models = ModelCache()
    loaded = models.open("reasoner")
    prompts = [[5] * 30, [6] * 70]
    for rows in ("model", "int8"):
        plan = Plan.uniform("rkv", budget=48, buffer=16, rows=rows).resolve(4)
        run = loaded.engine(plan, slots=2).generate(prompts, max_new_tokens=4)
        list(run)
        counted = models.bytes_per_sequence("reasoner", plan, Lengths(2, 74, 70))
        copied = run.report.peak_kv_bytes - 2 * counted
        assert 2 * 48 * 512 <= copied <= 2 * (48 + 16) * 512  # rows of one layer, at a compaction


# What reads the results of such a run


def run_of(sweep: Sweep, tmp_path: Path) -> RunFolder:
    return run_folder(tmp_path, sweep.to_dict(), [])


def pooled(cell: Cell, setting: EvalSettingRecord) -> PooledCell:
    one = sample(cell, 0, key=cell.id)
    return PooledCell(
        record=cell.record,
        group=setting,
        block=0,
        version="",
        cells=(cell.id,),
        groups=(setting.group,),
        runs=("run",),
        seeds=(0,),
        samples=(one,),
        items={},
        timings=(),
        num_expected=1,
    )


def test_cells_are_named_selected_and_paired_by_their_bytes(tmp_path: Path) -> None:
    given = {"knobs": {"rows": ("model", "int8")}, "n": 1}
    more = -(-longest(by_bytes(8192, **given)) * INTEGERS // 1024)  # KiB of the full cache
    sweep = by_bytes(8192, 1024 * more, **given)
    run = run_of(sweep, tmp_path)
    (setting,) = run.groups.values()
    cells = [pooled(cell, setting) for cell in sweep.cells]
    names = [cell.name for cell in cells]
    assert "h2o, rows=model@8KiB" in names
    assert f"h2o, rows=int8@{more}KiB" in names
    assert find_cell(cells, "H2O, rows=model@8kib") is cells[names.index("h2o, rows=model@8KiB")]
    pairs = pairs_with(cells, ["h2o, rows=model"], lambda group, cell: True)
    others = {(a.name, b.name) for a, b in pairs}
    assert ("h2o, rows=int8@8KiB", "h2o, rows=model@8KiB") in others
    assert ("full, rows=int8", f"h2o, rows=model@{more}KiB") in others
    assert not any("full, rows=model" in names for names in others), "it takes more"
    keep = select([run], budgets=["8KiB"])
    kept = [cell for cell in run.cells.values() if keep(setting, cell)]
    assert {cell.series for cell in kept} >= {"h2o, rows=model", "h2o, rows=int8"}
    assert all(8192 in cell.byte_limits for cell in kept)


def test_a_model_is_not_loaded_again_to_count_bytes() -> None:
    catalogue = Catalogue()
    config = attrs.evolve(BASE, models=("a", "b"), budgets=(), bytes=(6000,))
    order = []

    class Counting(Catalogue):
        def describe(self, name: str) -> object:  # type: ignore[override]
            order.append(name)
            return catalogue.describe(name)

        def bytes_per_sequence(self, name: str, plan: object, lengths: object) -> int:
            order.append(name)
            return super().bytes_per_sequence(name, plan, lengths)  # type: ignore[arg-type]

    build_sweep(config, Counting())
    assert [
        name for name, before in zip(order, [None, *order], strict=False) if name != before
    ] == [
        "b",
        "a",
    ]
