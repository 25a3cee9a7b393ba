"""Reading a policy's knobs and summary from its source, without running it.

`kvpolicy list` must answer at once and must survive a broken plugin. Importing a policy
imports torch, which takes seconds; its source tells the same.
"""

import ast
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class Knob:
    """One knob of a policy: its name, its type as written, its default as written."""

    name: str
    type: str
    default: str


@attrs.frozen
class Description:
    """What the source of a policy class says about it."""

    summary: str
    knobs: tuple[Knob, ...]


def describe(module: str, class_name: str) -> Description:
    """Describe a class by the module that defines or re-exports it.

    Raises:
        LookupError: If there is no such module, or no such class in it.
        SyntaxError: If the module cannot be parsed.
    """
    spec = _find(module)
    if spec is None or spec.origin is None:
        msg = f"there is no module '{module}'"
        raise LookupError(msg)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return describe_class(node)
        if isinstance(node, ast.ImportFrom) and not (node.level or 0) > 1:
            for alias in node.names:
                if (alias.asname or alias.name) == class_name:
                    source = f"{module}.{node.module}" if node.level else str(node.module)
                    return describe(source, alias.name)
    msg = f"there is no class '{class_name}' in module '{module}'"
    raise LookupError(msg)


def _find(module: str) -> ModuleSpec | None:
    """Where a module lives; `importlib.util.find_spec` would import the packages it is in."""
    spec: ModuleSpec | None = None
    path = None
    for end in [*(dot.start() for dot in re.finditer(r"\.", module)), len(module)]:
        found = (finder.find_spec(module[:end], path) for finder in sys.meta_path)
        spec = next(filter(None, found), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def describe_class(node: ast.ClassDef) -> Description:
    """Describe a class by its definition."""
    summary = (ast.get_docstring(node) or "").partition("\n")[0]
    knobs = (_knob(statement) for statement in node.body)
    return Description(summary, tuple(knob for knob in knobs if knob is not None))


def _knob(statement: ast.stmt) -> Knob | None:
    """The knob that an annotated assignment of an attrs class defines, if it does."""
    if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
        return None
    kind, name = ast.unparse(statement.annotation), statement.target.id
    if "ClassVar" in kind or name.startswith("_"):
        return None
    return Knob(name, kind, _default(statement.value))


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "required"
    if isinstance(value, ast.Call):
        keywords: dict[Any, ast.expr] = {word.arg: word.value for word in value.keywords}
        if "default" in keywords:
            return ast.unparse(keywords["default"])
        if "factory" in keywords:
            return f"{ast.unparse(keywords['factory'])}()"
        return ast.unparse(value.args[0]) if value.args else "required"
    return ast.unparse(value)
