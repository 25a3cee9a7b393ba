"""The example packages of third parties: their names, classes and plans fit each other.

`.ci/run` builds, installs and runs them.
"""

import ast
import sys
import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvpolicy import Plan, load_policy_file
from kvpolicy.plan.toml import policies_named

ROOT = Path(__file__).parents[2]
PACKAGES = sorted((ROOT / "docs" / "examples").glob("kvpolicy-*"))
PUBLIC = {"kvpolicy", "kvpolicy.toolkit", "kvpolicy.testing"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_registers_its_classes_and_its_plans_resolve(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package / "src"))
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = project["entry-points"]["kvpolicy.policies"]
    for name, value in own.items():
        policy = EntryPoint(name, value, "kvpolicy.policies").load()
        assert value.endswith(f":{policy.__name__}")
        load_policy_file(Path(sys.modules[policy.__module__].__file__ or ""))
    for plan in package.rglob("*.toml"):
        data = tomllib.loads(plan.read_text(encoding="utf-8"))
        if "budget" in data:
            assert set(policies_named(data)) & set(own)
            assert Plan.load(plan).resolve(4).compacting_layers()
    for point in project["entry-points"].get("kvpolicy.plans", {}):
        assert (
            package / "src" / package.name.replace("-", "_") / "plans" / f"{point}.toml"
        ).exists()
    import_module(package.name.replace("-", "_"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_imports_the_public_surface_only(package: Path) -> None:
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvpolicy":
                assert node.module in PUBLIC, file
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                assert not {name for name in names if name.startswith("kvpolicy.")} - PUBLIC, file
