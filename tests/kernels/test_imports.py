"""Where Triton or Numba is not installed, all but the modules named after it can be imported."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

spec = find_spec("kvpolicy.kernels")
assert spec is not None
assert spec.origin is not None
MODULES = {file.stem: file for file in Path(spec.origin).parent.glob("*.py")}
OPTIONAL = {
    package: {name for name in MODULES if name.startswith(f"{package}_")}
    for package in ("triton", "numba")
}


def imported_at_once(file: Path) -> set[str]:
    """Modules that importing a file imports."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", OPTIONAL)
def test_only_modules_named_after_a_package_import_it(package: str) -> None:
    ours = OPTIONAL[package]
    with_it = {package, f"{package}.language", *(f"kvpolicy.kernels.{name}" for name in ours)}
    importing = {name for name, file in MODULES.items() if imported_at_once(file) & with_it}
    assert importing == ours
    assert ours
