"""``kvpolicy list``: installed policies, including broken ones."""

from pathlib import Path

import pytest
from installed_package import Install
from shell import Shell

from kvpolicy.hooks import discovery

PLUGIN = '''
import attrs
from kvpolicy import hookimpl


@attrs.define(eq=False)
class EveryOther:
    """Keep every other row."""

    step: int = 2

    @hookimpl
    def score(self, positions):
        return positions % self.step
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN, encoding="utf-8")
    return path


def test_every_policy_is_listed_with_its_summary_and_knobs(kvpolicy: Shell) -> None:
    answer = kvpolicy("list")
    assert answer.status == 0
    text = " ".join(answer.out.split())  # long knobs are wrapped
    for info in discovery.installed_policies():
        assert info.name in text
        for knob in info.knobs:
            assert f"{knob.name}={knob.default}" in text


def test_lines_fit_the_terminal(kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, kvpolicy("list").out.splitlines())) <= 60


def test_json_has_the_documented_shape(kvpolicy: Shell) -> None:
    policies = kvpolicy("list", "--json").json
    assert [policy["name"] for policy in policies] == discovery.policy_names()
    for policy in policies:
        shape = {"name", "target", "distribution", "summary", "knobs", "problem"}
        assert policy.keys() == shape
        assert policy["problem"] is None
        assert all(knob.keys() == {"name", "type", "default"} for knob in policy["knobs"])


def test_a_file_adds_its_policies(kvpolicy: Shell, plugin: Path) -> None:
    answer = kvpolicy("list", "--plugin", plugin)
    assert "every_other" in answer.out
    assert "Keep every other row." in answer.out
    assert "step=2" in answer.out


def test_a_broken_policy_is_listed_with_the_reason_and_does_not_affect_others(
    kvpolicy: Shell, install: Install
) -> None:
    install("odd", {discovery.GROUP: {"broken": "no_such_package:Thing"}})
    answer = kvpolicy("list")
    assert answer.status == 0
    line = next(line for line in answer.out.splitlines() if line.startswith("broken "))
    assert "no_such_package" in line
    named = {p["name"]: p["problem"] for p in kvpolicy("list", "--json").json}
    assert "no_such_package" in named["broken"]
    assert all(problem is None for name, problem in named.items() if name != "broken")


def test_evictions_of_blocks_stand_behind_the_policies_and_alone(kvpolicy: Shell) -> None:
    whole = kvpolicy("list").out
    policies, _, blocks = whole.partition("\nFor stores of blocks")
    assert "\nguard " in blocks
    assert "\nguard " not in policies
    assert "snapkv" not in kvpolicy("list", "--blocks").out
    (guard,) = [
        one for one in kvpolicy("list", "--blocks", "--json").json if one["name"] == "guard"
    ]
    assert {"name": "predictor", "type": "str | Predictor", "default": "'popu'"} in guard["knobs"]
    assert kvpolicy("list", "--blocks", "--load").status == 0


def test_a_package_whose_entry_points_are_malformed_is_named_and_breaks_nothing(
    kvpolicy: Shell, install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("malformed", {})
    (tmp_path / "malformed-1.0.dist-info" / "entry_points.txt").write_text("[a]\nno target\n")
    known = {info.name for info in discovery.installed_policies()}
    assert "h2o" in known
    answer = kvpolicy("list")
    assert answer.status == 0
    assert known <= {*answer.out.split()}
    assert any("malformed" in record.getMessage() for record in caplog.records)
