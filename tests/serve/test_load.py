"""Many clients, some of which go away: `docs/benchmarks/serving_load.py`, asserted."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script
from slow_share import share_of

pytestmark = [pytest.mark.nightly, pytest.mark.needs_reasoner]

SECONDS = share_of(300)
MOST_GROWTH = 1.03  # of the memory in the last third over that in the second


def test_every_request_is_answered_once_with_the_tokens_of_the_engine_alone() -> None:
    script: Any = load_script("benchmarks/serving_load.py")
    found = script.measure(64, SECONDS, compared=share_of(200))
    assert found["problems"] == []
    assert found["compared"] == share_of(200)
    assert min(found["came"][kind] for kind in script.KINDS) > 0
    assert found["rss_mib"]["at_the_end"] < MOST_GROWTH * found["rss_mib"]["after_a_third"]
    lines = script.table(found).splitlines()
    assert len(lines) == 11


def test_the_script_prints_its_table_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Any = load_script("benchmarks/serving_load.py")
    file = tmp_path / "load.json"
    words = ["--clients", "4", "--seconds", "3", "--compare", "2", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["serving_load.py", *words])
    assert script.main() == 0
    assert "| first token, p50 / p95 |" in capsys.readouterr().out
    assert json.loads(file.read_text())["problems"] == []
