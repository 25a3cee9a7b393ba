"""The arrows between the parts, and the size of a file."""

import ast
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

# What a policy may import of kvpolicy. Everything else is the engine's own business.
PUBLIC = {
    "kvpolicy": "hookimpl and the other public names",
    "kvpolicy.hooks.defaults": "top_rows",
    "kvpolicy.errors": "KVPolicyError, for what a user can put right",
    "kvpolicy.toolkit.ranking": "rows in the order an earlier top-k left them",
    "kvpolicy.state": "Memory, for annotations",
    "kvpolicy.toolkit.attention_window": "the observation window",
    "kvpolicy.hooks.parts": "Parts, for annotations",
    "kvpolicy.toolkit.pinned": "steering vectors in plans",
    "kvpolicy.toolkit.redundancy": "redundancy among keys",
    "kvpolicy.registers": "Registers, for annotations",
    "kvpolicy.engine.request": "WaitingRequest, for annotations",
    "kvpolicy.cache.rows": "LayerRows and Tracks, for annotations",
    "kvpolicy.toolkit.apportion": "whole rows shared by weights, for allocate",
    "kvpolicy.toolkit.steering_vectors": "steering vectors",
    "kvpolicy.toolkit.paragraphs": "where paragraphs end and thinking begins",
    "kvpolicy.toolkit.token_text": "what tokens say",
}
WALL = 250


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _files(package: str) -> dict[str, Path]:
    """Every module of an installed package, by its dotted name."""
    folder = _folder(package)
    found = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join([package, *parts])] = file
    return found


CORE = _files("kvpolicy")
GUEST_PACKAGES = ["kvpolicy_baselines", "kvpolicy_plugins", "skipkv_plugin"]
WHOLE_PACKAGES = ["skipkv_plugin"]
GUESTS = {name: file for package in GUEST_PACKAGES for name, file in _files(package).items()}
POINTS = [
    p for p in entry_points(group="kvpolicy.policies") if p.dist and p.dist.name == "kvpolicy"
]


def _imports(module: str, file: Path) -> Iterator[str]:
    """Modules that a file imports, anywhere in it, type checking included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; write the whole name"
            assert node.module is not None
            yield node.module
            # `from kvpolicy import cache` imports a module as well.
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in inner if name in CORE or name in GUESTS)


def _texts(file: Path) -> Iterator[tuple[int, str]]:
    """String constants of a file, docstrings left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.lineno, node.value


def _home(module: str) -> str:
    """A policy is one file, or a package of its own."""
    package = module.partition(".")[0]
    return package if package in WHOLE_PACKAGES else module


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("module", GUESTS)
def test_a_policy_imports_only_public_modules(module: str) -> None:
    ours = {name for name in _imports(module, GUESTS[module]) if _within(name, "kvpolicy")}
    assert ours <= PUBLIC.keys()


@pytest.mark.parametrize("module", GUESTS)
def test_no_policy_imports_another(module: str) -> None:
    others = [
        name
        for name in _imports(module, GUESTS[module])
        if any(_within(name, package) for package in GUEST_PACKAGES)
        and not _within(name, _home(module))
    ]
    assert others == []


@pytest.mark.parametrize("module", CORE)
def test_the_host_imports_no_guest(module: str) -> None:
    guests = [
        name
        for name in _imports(module, CORE[module])
        if any(_within(name, package) for package in GUEST_PACKAGES)
    ]
    assert guests == []


@pytest.mark.parametrize("module", CORE)
def test_the_host_names_no_guest(module: str) -> None:
    """A name alone, or in quotes: `full` and `streaming` are also words of English."""
    names = "|".join(point.name for point in POINTS)
    named = [
        (line, text)
        for line, text in _texts(CORE[module])
        if re.search(rf"""^({names})$|["'`]({names})["'`]|\b({names})\.\w+=""", text)
    ]
    assert named == []


@pytest.mark.parametrize("module", CORE)
def test_the_engine_knows_no_lab_and_no_command_line(module: str) -> None:
    layers = {"kvpolicy.cli": [], "kvpolicy.lab": ["kvpolicy.cli"]}
    home = next((package for package in layers if _within(module, package)), None)
    forbidden = layers[home] if home else [*layers]
    if module == "kvpolicy.__main__":
        forbidden = ["kvpolicy.lab"]
    found = [
        name
        for name in _imports(module, CORE[module])
        if any(_within(name, package) for package in forbidden)
    ]
    assert found == []


@pytest.mark.parametrize("module", [*CORE, *GUESTS])
def test_a_file_is_no_longer_than_the_wall(module: str) -> None:
    file = (CORE | GUESTS)[module]
    assert len(file.read_text(encoding="utf-8").splitlines()) <= WALL


def test_every_public_module_exists() -> None:
    assert PUBLIC.keys() <= CORE.keys()


def test_the_page_shows_where_every_file_has_its_place() -> None:
    page = Path(__file__).parents[2] / "docs/explanation/architecture.md"
    told = set(re.findall(r"`(\w+)\.py`", page.read_text(encoding="utf-8")))
    root = _folder("kvpolicy")
    files = {file.stem for folder in (root, root / "lab") for file in folder.glob("*.py")}
    assert files - {"__init__", "__main__"} - told == set()
