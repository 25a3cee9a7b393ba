"""Packages import in one direction, without circles; policies use the public surface only."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvpolicy.hooks import declarations

# Packages of kvpolicy and the packages that each may import. A module at the top counts as a
# package of its own.
BASE = {
    *(
        "compat",
        "features",
        "devices",
        "entry_points",
        "errors",
        "extras",
        "files",
        "markers",
        "numba_common",
        "opaque",
        "plugin_code",
        "quantities",
    ),
    *("text", "triton_common", "validators"),
}
STATE = BASE | {"state"}
CACHE = STATE | {"attention", "cache"}
HOOKS = CACHE | {"hookspecs", "hooks"}
ENGINE = HOOKS | {"block_eviction", "engine", "model", "plan", "toolkit"}
ALLOWED = {
    **dict.fromkeys(BASE, BASE),
    "state": BASE,
    "toolkit": BASE | {"toolkit"},
    "attention": BASE | {"attention"},
    "cache": CACHE,
    "hookspecs": CACHE,
    "hooks": HOOKS,
    "block_eviction": HOOKS,
    "model": HOOKS | {"model"},
    "plan": HOOKS | {"plan"},
    "engine": ENGINE,
    "prompts": ENGINE,
    "hf": ENGINE | {"hf"},
    "testing": ENGINE | {"testing"},
    "cli": ENGINE | {"cli", "hf", "prompts", "testing"},
    "lab": ENGINE | {"cli", "hf", "lab", "prompts"},
    "serve": ENGINE | {"cli", "lab", "serve"},
    "__main__": {"cli"},
}
# Folders of the engine, each with the folders, and values and places beside them, that it may
# import; the loop imports all.
IN_ENGINE = {
    "snapshots": set[str](),
    "requests": {"snapshots"},
    "eviction": {"requests", "snapshots"},
    "extensions": {"compaction", "requests", "resuming", "reuse", "snapshots", "step"},
    "memory": {"bound_plan", "compose"},
    "reuse": {"requests", "snapshots"},
}
# Parts of the lab: each imports those of earlier rows, and none beside it. Its docstring says why.
IN_LAB = (
    {"statistics", "store", "sandbox", "shared", "labels", "looks"},
    {"tasks", "models", "figure"},
    {"analysis", "steer", "quality", "prompt_files", "lm_eval"},
    {"plots"},
    {"sweep"},
    {"executors", "report", "bench"},
    {"cli"},
)
POLICY_PACKAGES = ["kvpolicy_baselines", "kvpolicy_plugins", "skipkv_plugin"]
PLUGIN_PACKAGES = [*POLICY_PACKAGES, "kvpolicy_models", "kvpolicy_reasoner"]
PUBLIC = {"kvpolicy", "kvpolicy.toolkit"}
PAGE = Path(__file__).parents[2] / "docs/explanation/architecture.md"


def files_of(package: str) -> dict[str, Path]:
    """The file of every module of an installed package, by the module's dotted name."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    found = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join([package, *parts])] = file
    return found


@cache
def modules(package: str) -> dict[str, ast.Module]:
    """Every module of an installed package, by its dotted name."""
    return {
        name: ast.parse(file.read_text(encoding="utf-8"))
        for name, file in files_of(package).items()
    }


@cache
def every_module() -> dict[str, ast.Module]:
    packages = ["kvpolicy", *PLUGIN_PACKAGES]
    return {name: tree for package in packages for name, tree in modules(package).items()}


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a file: to walk takes longest."""
    return tuple(ast.walk(tree))


@cache
def imports(tree: ast.Module) -> tuple[str, ...]:
    """Modules that a file imports anywhere, also in functions and for type checking."""
    return tuple(_imports(tree))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import; write the whole name"
            assert node.module is not None
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in inner if name in every_module()]
            yield from found or [node.module]


def package_of(module: str) -> str:
    """``cache`` for ``kvpolicy.cache.rows``; empty for ``kvpolicy`` itself."""
    return ".".join(module.split(".")[1:2])


def in_lab(module: str) -> str:
    """``sweep`` for ``kvpolicy.lab.sweep.grid``."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["lab"] and len(parts) > 2 else ""


def in_engine(module: str) -> str:
    """``reuse`` for ``kvpolicy.engine.reuse.store``, ``step`` for ``kvpolicy.engine.step``."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["engine"] and len(parts) > 2 else ""


def test_parts_of_the_lab_import_those_of_earlier_rows_only() -> None:
    rows = {part: number for number, row in enumerate(IN_LAB) for part in row}
    found = {module: tree for module, tree in modules("kvpolicy").items() if in_lab(module)}
    assert {in_lab(module) for module in found} == rows.keys()
    assert [
        f"{module} imports {imported}"
        for module, tree in found.items()
        for imported in imports(tree)
        if in_lab(imported) not in ("", in_lab(module))
        if rows[in_lab(imported)] >= rows[in_lab(module)]
    ] == []
    explained = re.findall(r"`(\w+)`", ast.get_docstring(modules("kvpolicy")["kvpolicy.lab"]) or "")
    assert set(explained) == rows.keys(), "the docstring of the lab names each part"


def test_commands_are_all_of_the_lab_that_imports_what_commands_share() -> None:
    assert [
        f"{module} imports {imported}"
        for module, tree in modules("kvpolicy").items()
        if in_lab(module) not in ("", "cli")
        for imported in imports(tree)
        if package_of(imported) == "cli"
    ] == []


@pytest.mark.slow
def test_packages_import_only_what_the_list_allows() -> None:
    found = modules("kvpolicy")
    assert {package_of(module) for module in found} - {""} == ALLOWED.keys()
    forbidden = [
        f"{module} -> {name}"
        for module, tree in found.items()
        for name in imports(tree)
        if module != "kvpolicy" and name.startswith("kvpolicy.")
        if package_of(name) not in ALLOWED[package_of(module)]
    ]
    assert forbidden == []


def test_folders_of_the_engine_import_only_what_the_list_allows() -> None:
    in_folders = (one for one in modules("kvpolicy").items() if one[0].count(".") > 2)
    engine = {name: tree for name, tree in in_folders if in_engine(name)}
    assert {in_engine(name) for name in engine} == IN_ENGINE.keys()
    forbidden = [
        f"{module} -> {name}"
        for module, tree in engine.items()
        for name in imports(tree)
        if name.startswith("kvpolicy.engine.")
        if in_engine(name) not in {in_engine(module), *IN_ENGINE[in_engine(module)]}
    ]
    assert forbidden == []


def test_there_are_no_import_cycles() -> None:
    known = every_module()
    graph = {
        module: {name for name in imports(tree) if name in known and name != "kvpolicy"}
        for module, tree in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def modules_of_policies() -> dict[str, ast.Module]:
    return {name: tree for package in POLICY_PACKAGES for name, tree in modules(package).items()}


def test_policies_import_only_the_public_api() -> None:
    forbidden = [
        f"{module} -> {name}"
        for module, tree in modules_of_policies().items()
        if module not in commands_and_tasks()
        for name in imports(tree)
        if name.startswith(("kvpolicy", *PLUGIN_PACKAGES))
        if name not in PUBLIC and policy_of(name) != policy_of(module)
    ]
    assert forbidden == []


def test_commands_and_tasks_of_a_policy_import_no_other_policy() -> None:
    forbidden = [
        f"{module} -> {name}"
        for module, tree in modules_of_policies().items()
        if module in commands_and_tasks()
        for name in imports(tree)
        if name.startswith(tuple(POLICY_PACKAGES)) and policy_of(name) != policy_of(module)
    ]
    assert forbidden == []


def policy_of(module: str) -> str:
    """What a module is a part of: a file, or a package within a package of policies.

    `skipkv_plugin` is one policy as a whole.
    """
    depth = 1 if module.startswith("skipkv_plugin") else 2
    return ".".join(module.split(".")[:depth])


@cache
def commands_and_tasks() -> frozenset[str]:
    """Modules that entry points name as commands or tasks: they may use the lab and `cli`."""
    return frozenset(
        point.module
        for group in ("kvpolicy.commands", "kvpolicy.tasks")
        for point in entry_points(group=group)
    )


def test_kvpolicy_imports_and_names_no_plugin() -> None:
    """Allowed: names in docstrings, those of hooks, `full` and `random` in sentences."""
    names, methods = "|".join(names_of_plugins()), set(names_of_methods())
    pattern = re.compile(rf"""^({names})$|["'`]({names})["'`]|\b({names})\.\w+=""")
    may_name = re.compile(names).search  # most strings do not, and this is quick to see
    found = [
        f"{module}: {text}"
        for module, tree in modules("kvpolicy").items()
        for text in [
            *(name for name in imports(tree) if name.startswith(tuple(PLUGIN_PACKAGES))),
            *(text for text in _strings(tree) if may_name(text) and pattern.search(text)),
            *(name for name in _strings(tree) if name in PLUGIN_PACKAGES),
            *(name for name in _identifiers(tree) if set(_words(name)) & methods),
        ]
    ]
    assert found == []


@cache
def names_of_plugins() -> list[str]:
    """Policies and models of this project."""
    return [
        point.name
        for group in ("kvpolicy.policies", "kvpolicy.models")
        for point in entry_points(group=group)
        if point.dist and point.dist.name == "kvpolicy" and point.name not in declarations.HOOKS
    ]


def names_of_methods() -> list[str]:
    """Names of plugins that mean a method, and no word of English."""
    words = {"full", "guard", "merge", "mix", "protect", "random", "seal", "streaming"}
    return [name for name in names_of_plugins() if name not in words]


def _identifiers(tree: ast.Module) -> set[str]:
    """Names of functions, classes, arguments and variables of a module."""
    named = [getattr(node, "id", getattr(node, "arg", None)) for node in nodes(tree)]
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.alias)
    defined = [node.name for node in nodes(tree) if isinstance(node, kinds)]
    return {name for name in (*named, *defined) if name}


def _words(identifier: str) -> list[str]:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().split("_")


def _strings(tree: ast.Module) -> list[str]:
    """String constants of a module, without docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in nodes(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in nodes(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]


def test_architecture_page_lists_every_package_once() -> None:
    names = modules("kvpolicy")
    packages = {name.split(".")[1] for name in names if name.count(".") == 2}
    text, *_ = PAGE.read_text(encoding="utf-8").partition("\n## ")
    table = re.findall(r"^\| (`[^|]*) \|", text, re.M)
    rows = [name for cell in table for name in re.findall(r"`(\w+)/`", cell)]
    assert len(set(rows)) == len(rows)
    assert set(rows) - {"baselines", "plugins", "skipkv_plugin"} == packages
