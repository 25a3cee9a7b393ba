"""``kvpolicy check``: correct policies, broken policies and wrong options."""

from pathlib import Path

import pytest
from shell import Shell

from kvpolicy.testing import state_machine

PLUGIN = '''
import attrs
from kvpolicy import hookimpl


@attrs.define(eq=False)
class Sound:
    """Long keys stay."""

    order: float = 2.0

    @hookimpl
    def score(self, keys):
        return keys.float().norm(p=self.order, dim=-1)


@attrs.define(eq=False)
class Writes:
    """Writes into the keys."""

    @hookimpl
    def score(self, keys):
        return keys.abs_().float().sum(dim=-1) * 0 + keys.add_(1).float().mean(dim=-1)
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


@pytest.mark.nightly
def test_a_correct_policy_is_reported_clause_by_clause(kvpolicy: Shell, plugin: Path) -> None:
    answer = kvpolicy("check", "sound", "--plugin", plugin, "--cases", 8, "--set", "sound.order=1")
    assert answer.status == 0
    assert all(part in answer.out for part in ("'sound'", "clauses", "8 cases"))
    assert any(line.split()[:2] == ["tracks", "skipped:"] for line in answer.out.splitlines())


@pytest.mark.nightly
def test_a_broken_policy_does_not_stop_the_checks_of_others(
    kvpolicy: Shell, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_machine, "MAX_SHRINKS", 3)
    answer = kvpolicy("check", "writes", "sound", "--plugin", plugin, "--cases", 8, "--json")
    assert answer.status == 1
    broken, kept = answer.json_lines
    assert (broken["policy"], broken["clause"]) == ("writes", "read_only")
    assert "Trial('writes', " in broken["example"]["code"]
    assert (kept["policy"], kept["cases"]) == ("sound", 4)
    assert "1 of 2 policies" in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such"], "no policy is named 'no_such'"),
        (["streaming", "--profile", "slow"], "quick, ci, thorough"),
        (["streaming", "--set", "n_sink=2"], "POLICY.KNOB=VALUE"),
        (["streaming", "--set", "h2o.every=2"], "streaming"),
        (["streaming", "--set", "streaming.n_snik=2"], "did you mean n_sink"),
        (["streaming", "--cases", "0"], "--cases"),
    ],
)
def test_wrong_options_are_refused(kvpolicy: Shell, words: list[str], message: str) -> None:
    answer = kvpolicy("check", *words)
    assert answer.status == 2
    assert message in answer.err
    assert answer.out == ""
    assert "Traceback" not in answer.err
