"""Installed packages: entry points, package contents, and import costs."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint, distribution, entry_points
from importlib.resources import files
from pathlib import Path

import pytest
from fresh_process import run_fresh
from pages import build_wheel

from kvpolicy.hooks.discovery import GROUP, describe_policy

ROOT = Path(__file__).parents[2]
OURS = [
    point
    for kind in ("policies", "presets", "plans", "vectors", "rules")
    for point in entry_points(group=f"kvpolicy.{kind}")
    if point.dist and point.dist.name == "kvpolicy"
]
POLICIES = [point for point in OURS if point.group == "kvpolicy.policies"]
HEAVY = ("torch", "transformers", "numpy", "matplotlib", "rich", "pandas")


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _pyproject() -> dict:
    if not (ROOT / "kvpolicy").is_dir():
        pytest.skip("the sources are not here: these tests run against a wheel")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.nightly
def test_policy_is_imported_without_other_policies() -> None:
    code = f"""
import json, sys
from kvpolicy.entry_points import installed
modules = {[point.module for point in POLICIES]!r}
loaded = {{}}
for name, point in installed("kvpolicy.policies").items():
    for module in modules:
        sys.modules.pop(module, None)
    point.load()
    loaded[name] = sorted(sys.modules.keys() & modules)
print(json.dumps(loaded))
"""
    assert json.loads(_run(code)) == {point.name: [point.module] for point in POLICIES}


REASONERS = "kvpolicy_reasoner"
with_and_without_reasoners = pytest.mark.parametrize(
    "of_reasoners", [False, pytest.param(True, marks=pytest.mark.needs_reasoner)]
)


@with_and_without_reasoners
def test_entry_points_load(of_reasoners: bool) -> None:
    def problem(point: EntryPoint) -> str | None:
        try:
            point.load()
        except Exception as error:
            return repr(error)
        return None

    chosen = [point for point in OURS if point.module.startswith(REASONERS) == of_reasoners]
    problems = {f"{point.group} {point.name}": problem(point) for point in chosen}
    assert {name: found for name, found in problems.items() if found} == {}


def test_policy_is_described_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "broken_at_import"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "policy.py").write_text('class Some:\n    """It does something."""\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("some", "broken_at_import.policy:Some", GROUP)
    assert describe_policy(point).summary == "It does something."
    point = EntryPoint("some", "broken_at_import.other:Some", GROUP)
    assert describe_policy(point).problem == "there is no module 'broken_at_import.other'"


def test_importing_kvpolicy_imports_nothing_heavy() -> None:
    code = f"import sys, kvpolicy; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert _run(code) == "[]"


@pytest.mark.slow
def test_importing_kvpolicy_loads_no_policy(tmp_path: Path) -> None:
    code = (
        "import sys, kvpolicy.engine.engine; "
        "print([m for m in sys.modules if m.startswith('kvpolicy_')])"
    )
    assert run_fresh(code, folder=tmp_path).out == "[]\n"


def test_every_public_name_is_importable() -> None:
    import kvpolicy

    assert all(getattr(kvpolicy, name) is not None for name in kvpolicy.__all__)
    with pytest.raises(AttributeError, match="Engin"):
        _ = kvpolicy.Engin


def test_distribution_version_equals_dunder_version() -> None:
    import kvpolicy

    assert distribution("kvpolicy").version == kvpolicy.__version__


PACKAGES = [
    "kvpolicy",
    "kvpolicy_baselines",
    "kvpolicy_plugins",
    REASONERS,
    "skipkv_plugin",
]


DATA_FILES = [
    *((package, "py.typed") for package in PACKAGES),
    ("kvpolicy", "lab/steer/keywords/published.toml"),
    (REASONERS, "rules/reasoner.toml"),
    (REASONERS, "vectors/reasoner.safetensors"),
    (REASONERS, "layer_tables/reasoner.json"),
    *(
        (REASONERS, f"{folder}/{file}")
        for folder in ("weights/reasoner", "weights/reasoner-verbose")
        for file in ("config.json", "model.safetensors", "tokenizer.json")
    ),
    *(
        (REASONERS, f"weights/smollm2-reasoner/{file}")
        for file in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    ),
]


def test_data_files_are_in_their_packages() -> None:
    missing = [
        (package, file) for package, file in DATA_FILES if not (files(package) / file).is_file()
    ]
    assert missing == []


@pytest.mark.parametrize("container", ["baselines", "plugins"])
def test_every_package_in_a_container_is_listed(container: str) -> None:
    """An unlisted package would be missing from the wheel without an error."""
    listed = _pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert not (ROOT / container / "__init__.py").exists(), "a container is no package"
    inside = [init.parent for init in (ROOT / container).glob("*/__init__.py")]
    assert inside
    assert {str(package.relative_to(ROOT)) for package in inside} <= set(listed)


def test_package_of_the_tutorial_holds_every_module(tmp_path: Path) -> None:
    script = ROOT / ".ci" / "write_tutorial.py"
    if not script.is_file():
        pytest.skip("the sources are not here: these tests run against a wheel")
    package = tmp_path / "package"
    subprocess.run([sys.executable, script, package], check=True)
    (package / "kvpolicy_key_norm" / "another.py").write_text("X = 1\n")
    with zipfile.ZipFile(build_wheel(package, tmp_path)) as wheel:
        names = wheel.namelist()
        points = wheel.read("kvpolicy_key_norm-0.2.0.dist-info/entry_points.txt").decode()
    modules = {"__init__", "another", "key_norm", "value_norm"}
    assert {f"kvpolicy_key_norm/{module}.py" for module in modules} <= set(names)
    assert {name.split("/")[0] for name in names} == {
        "kvpolicy_key_norm",
        "kvpolicy_key_norm-0.2.0.dist-info",
    }
    assert re.findall(r"kvpolicy_key_norm\.(\w+):", points) == ["key_norm", "value_norm"]


def test_every_listed_package_exists() -> None:
    listed = _pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert all((ROOT / package / "__init__.py").is_file() for package in listed)
