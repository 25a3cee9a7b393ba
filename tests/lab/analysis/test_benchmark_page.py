"""The differences on SkipKV's page are those of ``kvpolicy results compare``."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from run_folders import write_run
from scripts import load_script

from kvpolicy.lab.statistics import paired_proportions


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return load_script("benchmarks/skipkv.py")


def _outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
    """R-KV is correct on the first item, SkipKV on all but the last, the others on none."""
    correct = {"R-KV 0.1": item < 1, "SkipKV 0.1": item < 7}
    return {"correct": correct.get(cell["series"], False)}


def test_differences_are_paired_and_corrected_for_all_of_the_page(
    page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series = ("SkipKV 0.1", "R-KV 0.1", "H2O of the paper's code", "full cache")
    plans = tuple((name, 64) for name in series)
    write_run(tmp_path / "run", plans=plans, outcome=_outcome)
    records = {one["difference"]: one["64"] for one in page.paired([tmp_path / "run"])}
    assert "3 comparisons" in capsys.readouterr().out

    def shown(*counts: int) -> str:
        found = paired_proportions(*counts)
        return f"{100 * found.value:+.1f} ({100 * found.low:+.1f} {100 * found.high:+.1f})"

    # p of 6, 7 and 1 items on one side: 2 / 2**6, 2 / 2**7 and 1; times 2, 3 and 1 after Holm.
    assert records == {
        "SkipKV 0.1 - R-KV 0.1": shown(1, 6, 0, 1),
        "SkipKV 0.1 - H2O of the paper's code": f"**{shown(0, 7, 0, 1)}**",
        "R-KV 0.1 - H2O of the paper's code": shown(0, 1, 0, 7),
    }
