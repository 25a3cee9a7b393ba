"""Commands say what in a plan changes nothing."""

from pathlib import Path

import pytest
from shell import Shell


@pytest.mark.needs_reasoner
def test_plan_check_run_and_ablate_tell_it(kvpolicy: Shell, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('stack = ["h2o", "adakv"]\nbudget = 16\n', encoding="utf-8")
    checked = kvpolicy("plan", "check", plan, "--json")
    assert checked.status == 0
    (warning,) = checked.json["warnings"]
    assert "adakv" in warning
    limits = ("--max-new-tokens", 2)
    assert warning in kvpolicy("plan", "check", plan).err
    assert warning in kvpolicy("run", "1+1=", "--plan", plan, *limits).err
    swept = kvpolicy("ablate", "--plan", plan, "--n", 1, *limits, "--output", tmp_path / "swept")
    assert warning in swept.err
    assert warning in kvpolicy("ablate", "--plan", plan, "--dry-run").err
