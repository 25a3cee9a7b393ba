"""What a prefix store saves, `docs/benchmarks/prefix_reuse.py`."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/prefix_reuse.py")


def test_ratios_are_those_of_the_same_prompt(script: ModuleType) -> None:
    asked = [
        script.Asked((100, 100), (1.0, 1.5)),
        script.Asked((100, 10), (1.0, 0.2)),
        script.Asked((100, 10), (2.0, 0.6)),
        script.Asked((100, 10), (4.0, 0.4)),
    ]
    found = script.summary(asked, 1)
    assert found["computed_ratio"] == pytest.approx(130 / 400)
    assert found["first_token_ratio"] == pytest.approx(0.2)
    assert found["first_token_s"] == pytest.approx(0.4)
    assert script.summary(asked)["first_token_ratio"] == pytest.approx(0.25)


@pytest.mark.slow
def test_the_script_prints_a_table_and_writes_every_measurement(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--shape", "tiny", "--system", "70", "--questions", "3", "--turns", "2"]
    few = ["--plans", "full;h2o, prompt evicted", "--block", "8", "--question", "5"]
    script.main(
        [*sizes, *few, "--answer", "3", "--fresh", "2", "--json", str(tmp_path / "reuse.json")]
    )
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 2
    found = json.loads((tmp_path / "reuse.json").read_text())
    full = found["full"]
    assert [one["computed"] for one in full["asked"]["questions"]] == [[75, 75], [75, 11], [75, 11]]
    assert [one["computed"] for one in full["asked"]["turns"]] == [[75, 11], [83, 6]]
    assert [one["computed"] for one in full["asked"]["fresh"]] == [[75, 75], [75, 75]]
    assert full["questions"]["computed_ratio"] == pytest.approx(97 / 225)
    assert f"| full | {97 / 225:.3f} | " in printed[2]
    assert full["store"]["turns"] == 1
