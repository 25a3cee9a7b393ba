"""The glossary: its terms exist in the code, and avoided terms are not used."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "glossary.md"
PACKAGES = ["kvpolicy", "kvpolicy_baselines", "kvpolicy_plugins", "skipkv_plugin"]


def _rows() -> list[list[str]]:
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [row for row in rows if row[0] != "term"]


@cache
def _trees() -> list[ast.Module]:
    trees = []
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        for file in Path(spec.submodule_search_locations[0]).rglob("*.py"):
            trees.append(ast.parse(file.read_text(encoding="utf-8")))
    return trees


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Fields, methods, properties and attributes set by ``self.NAME = ...``."""
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            yield inner.name
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            yield inner.target.id
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr


@cache
def _defined() -> set[str]:
    names = set()
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{member}" for member in _members(node)}
            if isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@cache
def _public_names() -> set[str]:
    """Public names of functions, classes and parameters."""
    names = set()
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
                listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names |= {argument.arg for argument in listed}
    return {name for name in names if not name.startswith("_")}


def test_every_term_is_defined_once() -> None:
    terms = [term.strip() for row in _rows() for term in row[0].split(",")]
    assert len(terms) > 30
    assert len(set(terms)) == len(terms)
    assert all(len(row) == 4 and row[1] for row in _rows())


@pytest.mark.parametrize(
    "name", sorted({n for row in _rows() for n in re.findall(r"`(.+?)`", row[2])})
)
def test_term_names_something_in_the_code(name: str) -> None:
    assert name in _defined()


@pytest.mark.parametrize("term", sorted({w for row in _rows() for w in row[3].split(", ") if w}))
def test_avoided_term_is_not_used(term: str) -> None:
    as_part = re.compile(rf"(^|_){term}(_|$)")
    assert not [name for name in _public_names() if as_part.search(name.lower())]
