"""The differences on the page of related systems: paired, and corrected over all of the page."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from run_folders import write_run
from scripts import load_script

from kvpolicy.lab.analysis.pooling import PooledCell, pool
from kvpolicy.lab.analysis.select import open_runs
from kvpolicy.lab.statistics import paired_proportions

PLANS = tuple((name, 64) for name in ("TRIM-KV", "R-KV", "H2O"))


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return load_script("benchmarks/related.py")


def _outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
    """TRIM-KV is correct on all twelve items, R-KV on the first four, H2O on the first eleven."""
    return {"correct": item < {"TRIM-KV": 12, "R-KV": 4, "H2O": 11}[cell["series"]]}


@pytest.fixture
def cells(tmp_path: Path) -> list[PooledCell]:
    write_run(tmp_path / "run", plans=PLANS, n=12, outcome=_outcome)
    return pool(open_runs([str(tmp_path / "run")], warn=print))


@pytest.fixture
def epicache(tmp_path: Path) -> Path:
    """Twelve conversations of two questions; the episodes answer one more in eleven of them."""
    answers = {
        "4 episodes": [[True, True]] * 12,
        "one cache": [[True, False]] * 11 + [[True, True]],
    }
    file = tmp_path / "epicache.json"
    file.write_text(
        json.dumps({"task": "conversation", "conversations": 12, "answers": answers}), "utf-8"
    )
    return file


def test_differences_are_paired_and_corrected_for_all_of_the_page(
    page: ModuleType, cells: list[PooledCell], epicache: Path
) -> None:
    found = {(one.system, one.base): one for one in page.differences(cells, epicache)}
    assert found.keys() == {("TRIM-KV", "H2O"), ("TRIM-KV", "R-KV"), ("4 episodes", "one cache")}
    # One-sided items: 1, 8 and 11, so p is 1, 2 / 2**8 and 2 / 2**11; times 1, 2 and 3 after Holm.
    p_holm = {pair: one.p_holm for pair, one in found.items()}
    assert p_holm == pytest.approx(
        {
            ("TRIM-KV", "H2O"): 1,
            ("TRIM-KV", "R-KV"): 2 * 2 / 2**8,
            ("4 episodes", "one cache"): 3 * 2 / 2**11,
        }
    )
    against_rkv = paired_proportions(4, 8, 0, 0)
    assert found["TRIM-KV", "R-KV"].interval == against_rkv
    assert found["4 episodes", "one cache"].interval.value == pytest.approx(11 / 24)
    assert found["TRIM-KV", "R-KV"].text().startswith("**+66.7 (")
    assert found["TRIM-KV", "H2O"].text().startswith("+8.3 (")


def test_tables_have_a_column_for_each_setting_and_the_problems_needed(
    page: ModuleType,
    cells: list[PooledCell],
    epicache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page.print_tables(cells, epicache)
    printed = capsys.readouterr().out
    assert "3 comparisons, 2 significant" in printed
    setting = "reasoner reasoner, 64 rows: accuracy"
    assert f"| series | {setting} |" in printed
    assert f"| difference | {setting} | conversation, 12 conversations |" in printed
    # One comparison is not significant, and differs on one of twelve items. At a level of 5 % and a
    # power of 80 %, that takes (1.95996 + 0.84162)**2 / 12 / 0.05**2 problems.
    assert f"| {setting} | 12 | at most 8% | at most 262 |" in printed


def test_the_figure_is_drawn_from_the_same_differences(
    page: ModuleType, cells: list[PooledCell], tmp_path: Path
) -> None:
    page.save_differences(cells, tmp_path / "f.png", None)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
