"""Installed policies: list them with their knobs, import and build them by name.

The entry points of the group ``kvpolicy.policies`` register policy classes. Only the class
that is requested is imported, so a broken policy does not affect the others. `kvpolicy list`
reads knobs and summaries from the source: importing a policy would import torch.
"""

import ast
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.entry_points import (
    conflict,
    distribution,
    installed,
    load_installed,
    module_and_name,
    nearest,
    parse_module,
)
from kvpolicy.errors import (
    KnobError,
    KVPolicyError,
    PolicyLoadError,
    UnknownPolicyError,
    error_text,
    refusal_reason,
    shown,
)
from kvpolicy.files import path_of
from kvpolicy.markers import hook_options
from kvpolicy.plugin_code import plugin_code

GROUP = "kvpolicy.policies"

# Policies of files given with --plugin: name -> (class, file).
_from_files: dict[str, tuple[type, Path]] = {}


@attrs.frozen
class Knob:
    """One knob of a policy: its name, its type as written, its default as written."""

    name: str
    type: str
    default: str


@attrs.frozen
class PolicyInfo:
    """One policy as `kvpolicy list` shows it.

    Attributes:
        name: Its name in a plan.
        target: ``module:Class``, or the path of its file.
        distribution: Package that installed it, with version; empty for a file.
        summary: First line of its docstring.
        knobs: Its knobs with types and defaults.
        problem: Why it cannot be read, if it cannot.
    """

    name: str
    target: str
    distribution: str = ""
    summary: str = ""
    knobs: tuple[Knob, ...] = ()
    problem: str | None = None


def installed_policies() -> list[PolicyInfo]:
    """All policies that a plan may name, in alphabetical order, without importing them."""
    found = {}
    for name, point in installed(GROUP).items():
        found[name] = describe_policy(point)
        several = conflict(GROUP, name)
        if several is not None:
            found[name] = attrs.evolve(found[name], problem=several)
    found |= {name: _file_info(name, path) for name, (_, path) in _from_files.items()}
    return [found[name] for name in sorted(found)]


def policy_names() -> list[str]:
    """Names of all policies that a plan may name."""
    return sorted({*installed(GROUP), *_from_files})


def load_policy(name: str, /, **knobs: Any) -> object:
    """Build a policy by its name in a plan.

    Args:
        name: Name of the entry point, or of a policy registered by `load_policy_file`.
        knobs: Its knobs; those not given take their defaults.

    Raises:
        UnknownPolicyError: No policy has this name.
        PolicyLoadError: Its module cannot be imported or has no such class.
        KnobError: It has no such knob, or rejects a value.
    """
    cls = load_policy_class(name)
    with plugin_code(f"policy '{name}' has no readable signature", PolicyLoadError):
        known = _knob_names(cls)
    for knob in knobs:
        if known is not None and knob not in known:
            msg = f"policy '{name}' has no knob '{knob}'{nearest(knob, known)}"
            raise KnobError(msg)
    with plugin_code(
        f"policy '{name}' refuses its knobs",
        KnobError,
        hint=". See `kvpolicy list`",
        describe=refusal_reason,
        passes=(KVPolicyError,),
    ):
        return cls(**knobs)


def load_policy_class(name: str) -> type:
    """Import the class that a name stands for; raises as `load_policy` does."""
    if not isinstance(name, str):
        msg = f"no policy is named {shown(name)}; give a text{nearest('', policy_names())}"
        raise UnknownPolicyError(msg)
    if name in _from_files:
        return _from_files[name][0]
    if name not in installed(GROUP):
        msg = f"no policy is named {shown(name)}{nearest(name, policy_names())}"
        raise UnknownPolicyError(msg)
    loaded = load_installed(GROUP, name, what="policy", error=PolicyLoadError)
    if not _is_class(loaded):
        msg = f"policy '{name}' ({installed(GROUP)[name].value}) is not a class but {shown(loaded)}"
        raise PolicyLoadError(msg)
    cls: type = loaded
    return cls


def load_policy_file(path: str | Path) -> list[str]:
    """Make the policies of one Python file available by name.

    Every class of the file that implements a hook is a policy; its name is the class name in
    snake case (``class KeyNorm`` is ``key_norm``).

    Returns:
        The names.

    Raises:
        PolicyLoadError: The file cannot be read or run, holds no policy, or one whose name is
            taken.
    """
    path = path_of(path, "a plugin file", error=PolicyLoadError)
    if not path.is_file():
        problem = "is no file" if path.exists() else "does not exist"
        msg = f"plugin file '{path}' {problem}; give the path of a Python file"
        raise PolicyLoadError(msg)
    module_name = f"kvpolicy_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        msg = f"plugin file '{path}' is not Python; its name should end in .py"
        raise PolicyLoadError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with plugin_code(f"plugin file '{path}' cannot be run", PolicyLoadError, imports=True):
            spec.loader.exec_module(module)
            classes = [
                value
                for value in vars(module).values()
                if _is_class(value) and value.__module__ == module_name and _implements_hook(value)
            ]
            named = [(snake_case(cls.__name__), cls) for cls in classes]
        policies = _check_names(named, path)
    except BaseException:
        sys.modules.pop(module_name, None)
        raise
    _from_files.update({name: (cls, path.resolve()) for name, cls in policies.items()})
    return list(policies)


def _check_names(named: Sequence[tuple[str, type]], path: Path) -> dict[str, type]:
    """The policies of a file by name; raises `PolicyLoadError` if there are none, or one twice."""
    if not named:
        msg = (
            f"plugin file '{path}' holds no policy: no class of it has a method decorated "
            "with @kvpolicy.hookimpl"
        )
        raise PolicyLoadError(msg)
    policies: dict[str, type] = {}
    for name, cls in named:
        other = None
        if policies.get(name, cls) is not cls:
            other = f"class {policies[name].__name__} of the same file"
        elif name in _from_files and _from_files[name][1] != path.resolve():
            other = f"plugin file '{_from_files[name][1]}'"
        elif name in (points := installed(GROUP)):
            other = f"the installed {distribution(points[name])} ({points[name].value})"
        if other is not None:
            msg = (
                f"class {cls.__name__} of plugin file '{path}' is the policy '{name}', and so is "
                f"that of {other}; rename the class"
            )
            raise PolicyLoadError(msg)
        policies[name] = cls
    return policies


def registered_files() -> list[Path]:
    """The files given to `load_policy_file`, so that worker processes can register them, too."""
    return list(dict.fromkeys(path for _, path in _from_files.values()))


def forget_files() -> None:
    """Forget the policies of files that were given to `load_policy_file`, as in a new process."""
    _from_files.clear()


def snake_case(class_name: str) -> str:
    """``KeyNorm`` as ``key_norm``, ``H2O`` as ``h2o``."""
    out = class_name[:1]
    for before, letter in itertools.pairwise(class_name):
        out += f"_{letter}" if letter.isupper() and before.islower() else letter
    return out.lower()


def _find_class(module: str, class_name: str) -> ast.ClassDef:
    """The source of a class, following re-exports.

    Raises:
        LookupError: There is no such module, it cannot be read, or has no such class.
        RecursionError: Modules import the class from each other in a circle.
    """
    for node in parse_module(module).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return node
        if isinstance(node, ast.ImportFrom) and not (node.level or 0) > 1:
            for alias in node.names:
                if (alias.asname or alias.name) == class_name:
                    source = f"{module}.{node.module}" if node.level else str(node.module)
                    return _find_class(source, alias.name)
    msg = f"there is no class '{class_name}' in module '{module}'"
    raise LookupError(msg)


def _describe(info: PolicyInfo, node: ast.ClassDef) -> PolicyInfo:
    summary = (ast.get_docstring(node) or "").partition("\n")[0]
    knobs = (_knob(statement) for statement in node.body)
    return attrs.evolve(info, summary=summary, knobs=tuple(filter(None, knobs)))


def _knob(statement: ast.stmt) -> Knob | None:
    """The knob that a statement of an attrs class defines, if it defines one."""
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
        keywords: dict[Any, ast.expr] = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in keywords:
            return ast.unparse(keywords["default"])
        if "factory" in keywords:
            return f"{ast.unparse(keywords['factory'])}()"
        return ast.unparse(value.args[0]) if value.args else "required"
    return ast.unparse(value)


def _is_class(value: object) -> bool:
    """Whether an object is a class; unlike `isinstance`, does not ask the object."""
    return issubclass(type(value), type)


def _implements_hook(cls: type) -> bool:
    return any(hook_options(value) is not None for value in vars(cls).values())


def _knob_names(cls: type) -> Sequence[str] | None:
    """Names of the knobs a class takes; ``None`` if it takes any, or has no signature."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def describe_policy(point: EntryPoint) -> PolicyInfo:
    """Summary and knobs of an installed policy, read from its source."""
    info = PolicyInfo(point.name, point.value, distribution(point))
    try:
        return _describe(info, _find_class(*module_and_name(point)))
    except (LookupError, RecursionError) as error:
        return attrs.evolve(info, problem=error_text(error))


def _file_info(name: str, path: Path) -> PolicyInfo:
    info = PolicyInfo(name, str(path))
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and snake_case(node.name) == name:
            info = _describe(info, node)
    return info
