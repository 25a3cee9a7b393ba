"""Finding policies by name, reading their source, and loading them."""

import ast
import subprocess
import sys
from importlib import metadata
from importlib.metadata import EntryPoint

import attrs
import pytest

from kvpolicy.errors import KnobError, PolicyLoadError, UnknownPolicyError
from kvpolicy.hooks import discovery
from kvpolicy.hooks.discovery import (
    installed_policies,
    load_policy,
    load_policy_class,
    load_policy_file,
    policy_names,
)

INSTALLED = [info.name for info in installed_policies()]

ONE_FILE = '''
import attrs
from torch import Tensor
from kvpolicy import hookimpl

@attrs.define(eq=False, kw_only=True)
class KeyNorm:
    """Keep rows with short keys."""

    power: int = 2

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return -keys.norm(dim=-1) ** self.power
'''


@pytest.mark.few(8)
@pytest.mark.parametrize("name", INSTALLED)
def test_summary_and_knobs_from_the_source_match_the_class(name):
    info = next(info for info in installed_policies() if info.name == name)
    cls = load_policy_class(name)
    assert info.problem is None
    assert info.summary == cls.__doc__.splitlines()[0]
    fields = {field.name: field.default for field in attrs.fields(cls) if field.init}
    assert [knob.name for knob in info.knobs] == list(fields)
    for knob in info.knobs:
        assert ast.literal_eval(knob.default) == fields[knob.name]


def test_listing_policies_imports_none_of_them():
    code = (
        "import sys; from kvpolicy import installed_policies; installed_policies(); "
        "print([n for n in sys.modules if n == 'torch' or n.startswith('kvpolicy_baselines.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_policy_suggests_the_nearest_name():
    with pytest.raises(UnknownPolicyError, match=r"'strming'.* streaming"):
        load_policy("strming")


def test_unknown_knob_suggests_the_nearest_name():
    with pytest.raises(KnobError, match=r"'n_snik'.* n_sink"):
        load_policy("streaming", n_snik=3)


def test_invalid_knob_error_names_policy_and_knob():
    with pytest.raises(KnobError, match=r"'streaming'.*'n_sink'"):
        load_policy("streaming", n_sink=-1)


def test_policy_with_import_error_does_not_affect_others(monkeypatch):
    points = [
        EntryPoint("broken", "no_such_module:Policy", discovery.GROUP),
        *metadata.entry_points(group=discovery.GROUP),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    with pytest.raises(PolicyLoadError, match=r"policy .broken. .*no_such_module"):
        load_policy("broken")
    assert load_policy("streaming").n_sink == 4
    listed = {info.name: info.problem for info in installed_policies()}
    assert "no module 'no_such_module'" in listed["broken"]
    assert listed["streaming"] is None


def test_policy_of_a_package_installed_meanwhile_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "later" not in policy_names()
    info = tmp_path / "later-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{discovery.GROUP}]\nlater = later:Later\n")
    assert "later" in policy_names()


def test_policies_of_a_file_are_named_after_their_classes(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ONE_FILE)
    assert load_policy_file(path) == ["key_norm"]
    assert load_policy("key_norm", power=3).power == 3
    info = next(info for info in installed_policies() if info.name == "key_norm")
    assert (info.summary, info.knobs[0].name) == ("Keep rows with short keys.", "power")
    assert info.target == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        ("def (", "SyntaxError"),
        ("x = 1", "no policy"),
    ],
)
def test_file_without_a_policy_raises(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(PolicyLoadError, match=message):
        load_policy_file(path)


def test_missing_file_is_named_in_the_error(tmp_path):
    with pytest.raises(PolicyLoadError, match=r"nothing\.py"):
        load_policy_file(tmp_path / "nothing.py")


@pytest.mark.parametrize(
    ("class_name", "name"), [("KeyNorm", "key_norm"), ("H2O", "h2o"), ("RKV", "rkv"), ("A", "a")]
)
def test_policy_name_is_class_name_in_snake_case(class_name, name):
    assert discovery.snake_case(class_name) == name
