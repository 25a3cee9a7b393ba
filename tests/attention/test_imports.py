"""Where Triton or Numba is not installed, all but the modules named after it can be imported."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

spec = find_spec("kvpolicy")
assert spec is not None
assert spec.origin is not None
ROOT = Path(spec.origin).parent
MODULES = {
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts): file
    for file in ROOT.rglob("*.py")
    if file.name != "__init__.py"
}


@cache
def imported_at_once(file: Path) -> set[str]:
    """Modules that importing a file imports."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", ["triton", "numba"])
def test_only_modules_named_after_a_package_import_it(package: str) -> None:
    ours = {name for name in MODULES if f".{package}_" in name}
    with_it = {package, f"{package}.language", *ours}
    importing = {name for name, file in MODULES.items() if imported_at_once(file) & with_it}
    assert importing <= ours
    assert importing
