"""A file that a knob names is part of the digest, whoever has written the policy."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from kvpolicy import Plan, hookimpl
from kvpolicy.plan.resolved import ResolvedPlan


@attrs.define(eq=False, kw_only=True)
class Calibrated:
    """Takes the path of a table in any of the ways in which knobs may hold it."""

    table: Any = None

    @hookimpl
    def score(self, keys):
        return keys.norm(dim=-1)


def resolved(table: Any) -> ResolvedPlan:
    return Plan.uniform(Calibrated(table=table), budget=16).resolve(2)


FORMS = {
    "path": lambda path: path,
    "text": str,
    "list": lambda path: ["mean", path],
    "table": lambda path: {"parts": ({"file": str(path)},)},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_file_that_is_made_again_is_another_plan(form: Any, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text("[1, 2]")
    first = resolved(form(file))
    assert resolved(form(file)).digest() == first.digest()
    file.write_text("[1, 3]")
    assert resolved(form(file)).digest() != first.digest()
    file.write_text("[1, 2]")
    assert resolved(form(file)).digest() == first.digest()


def test_the_hash_is_that_of_the_moment_when_the_plan_was_resolved(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text("[1, 2]")
    plan = resolved(file)
    file.unlink()
    assert list(plan.to_dict()["files"]) == [str(file)]


def test_knobs_that_name_no_file_add_nothing(tmp_path: Path) -> None:
    for knob in (None, 3, "mean", "no\0file", "x" * 5000, tmp_path, tmp_path / "missing", ["a"]):
        assert "files" not in resolved(knob).to_dict()


def test_the_same_file_in_another_folder_is_the_same_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "table.json").write_text("[1, 2]")
        monkeypatch.chdir(tmp_path / folder)
        digests.add(resolved("table.json").digest())
    assert len(digests) == 1
