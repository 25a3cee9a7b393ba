"""The glossary: each term has one definition, and what it names in the code exists."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "glossary.md"
PACKAGES = ["kvpolicy", "kvpolicy_baselines", "kvpolicy_plugins", "skipkv_plugin"]


def _rows() -> list[list[str]]:
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [row for row in rows if row[0] != "term"]


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


def test_every_term_is_defined_once() -> None:
    terms = [term.strip() for row in _rows() for term in row[0].split(",")]
    assert len(set(terms)) == len(terms)
    assert [row for row in _rows() if len(row) != 3 or not row[1]] == []


def test_terms_name_what_exists_in_the_code() -> None:
    named = {name for row in _rows() for name in re.findall(r"`(.+?)`", row[2])}
    assert "Request" in named
    assert sorted(named - _defined()) == []
