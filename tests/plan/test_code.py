"""The digest of a plan depends on the code of its policies."""

from pathlib import Path

import attrs
import pytest

from kvpolicy import Plan, hookimpl
from kvpolicy.hooks import discovery
from kvpolicy.hooks.discovery import installed_policies, load_policy_class, load_policy_file
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.plan.spec import hash_of_code

SOURCE = """
from kvpolicy import hookimpl

class KeyNorm:
    @hookimpl
    def score(self, keys):
        return {sign}keys.norm(dim=-1)
"""


@attrs.define(eq=False, kw_only=True)
class Mine:
    power: int = 2

    @hookimpl
    def score(self, keys):
        return -(keys.norm(dim=-1) ** self.power)


def resolved(folder: Path, source: str, *stack: str) -> ResolvedPlan:
    folder.mkdir(exist_ok=True)
    discovery.forget_files()  # two files with one policy are refused
    (folder / "key_norm.py").write_text(source, encoding="utf-8")
    load_policy_file(folder / "key_norm.py")
    return Plan.uniform(*(stack or ("key_norm", "protect")), budget=16, buffer=4).resolve(2)


def test_an_edited_policy_changes_the_digest(tmp_path):
    before = resolved(tmp_path, SOURCE.format(sign="-"))
    digest = before.digest()
    assert list(before.to_dict()["code"]) == ["key_norm"]
    edited = resolved(tmp_path, SOURCE.format(sign="+"))
    assert edited.to_dict()["layers"] == before.to_dict()["layers"]
    assert edited.digest() != digest
    elsewhere = resolved(tmp_path / "elsewhere", SOURCE.format(sign="-"))
    assert elsewhere.digest() == digest, "the folder of the file does not matter"


def test_a_registered_file_does_not_change_other_plans(tmp_path):
    alone = Plan.uniform("knorm", budget=16, buffer=4).resolve(2).digest()
    assert resolved(tmp_path, SOURCE.format(sign="-"), "knorm").digest() == alone


def test_a_policy_object_is_identified_by_its_file():
    code = Plan.uniform(Mine(), budget=16).resolve(2).to_dict()["code"]
    assert list(code) == ["mine"]


OURS = [one.name for one in installed_policies() if one.distribution.startswith("kvpolicy ")]


@pytest.mark.parametrize("name", OURS)
def test_policies_of_this_project_have_no_code_hash(name):
    assert hash_of_code(load_policy_class(name)) is None
