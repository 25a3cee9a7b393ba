"""Finding policies by entry point and building them by name.

Installed is not active: an entry point names a class, and only the one that is asked for is
imported. A broken policy harms nobody else.
"""

import ast
import difflib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.errors import (
    KnobError,
    KVPolicyError,
    PolicyLoadError,
    UnknownPolicyError,
    error_summary,
)
from kvpolicy.hooks.describe import Description, Knob, describe, describe_class

GROUP = "kvpolicy.policies"

_LONGEST_NAME = 100  # whoever types more than this has not misspelt a name

# Policies of files given with --plugin: name -> (class, file). Files are named explicitly by
# the user, so there is nothing to discover; they shadow installed policies of the same name.
_from_files: dict[str, tuple[type, Path]] = {}


@attrs.frozen
class PolicyInfo:
    """One policy as `kvpolicy list` shows it.

    Attributes:
        name: What a plan calls it.
        target: ``module:Class``, or the file it comes from.
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
    found = {point.name: _info(point) for point in entry_points(group=GROUP)}
    found |= {name: _file_info(name, path) for name, (_, path) in _from_files.items()}
    return [found[name] for name in sorted(found)]


def policy_names() -> list[str]:
    """Names of all policies that a plan may name."""
    return sorted({point.name for point in entry_points(group=GROUP)} | set(_from_files))


def load_policy(name: str, /, **knobs: Any) -> object:
    """Build a policy by the name a plan calls it.

    Args:
        name: Name of the entry point, or of a policy registered by `register_file`.
        knobs: Its knobs; those left out take their defaults.

    Raises:
        UnknownPolicyError: If no policy has this name.
        PolicyLoadError: If its module cannot be imported or has no such class.
        KnobError: If it has no such knob, or refuses a value.
    """
    return _build(name, load_policy_class(name), knobs)


def load_policy_class(name: str) -> type:
    """Import the class that answers to a name; see `load_policy` for the errors."""
    if name in _from_files:
        return _from_files[name][0]
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points:
        msg = f"no policy is named '{name}'{nearest(name, policy_names())}"
        raise UnknownPolicyError(msg)
    try:
        loaded = points[0].load()
    except (Exception, SystemExit) as error:
        msg = (
            f"policy '{name}' ({points[0].value}, {_distribution(points[0])}) cannot be "
            f"imported: {error_summary(error)}"
        )
        raise PolicyLoadError(msg) from error
    if not inspect.isclass(loaded):
        msg = f"policy '{name}' ({points[0].value}) is not a class but {loaded!r}"
        raise PolicyLoadError(msg)
    return loaded


def register_file(path: str | Path) -> list[str]:
    """Make the policies of one Python file available by name.

    Every class of the file that implements a hook is a policy; its name is the class name in
    lower case with underscores (``class KeyNorm`` is ``key_norm``).

    Returns:
        The names.

    Raises:
        PolicyLoadError: If the file cannot be read or run, or holds no policy.
    """
    path = Path(path)
    if not path.is_file():
        msg = f"plugin file '{path}' does not exist; give the path of a Python file"
        raise PolicyLoadError(msg)
    module_name = f"kvpolicy_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        msg = f"plugin file '{path}' is not Python; its name should end in .py"
        raise PolicyLoadError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        msg = f"plugin file '{path}' cannot be run: {error_summary(error)}"
        raise PolicyLoadError(msg) from error
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module_name and _implements_hook(value)
    ]
    if not classes:
        msg = (
            f"plugin file '{path}' holds no policy: no class of it has a method decorated "
            "with @kvpolicy.hookimpl"
        )
        raise PolicyLoadError(msg)
    names = [snake_case(cls.__name__) for cls in classes]
    _from_files.update(
        {name: (cls, path.resolve()) for name, cls in zip(names, classes, strict=True)}
    )
    return names


def registered_files() -> list[Path]:
    """The files given to `register_file`, for processes that are to know the same policies."""
    return list(dict.fromkeys(path for _, path in _from_files.values()))


def snake_case(class_name: str) -> str:
    """``KeyNorm`` as ``key_norm``, ``H2O`` as ``h2o``."""
    out = class_name[0]
    for before, letter in itertools.pairwise(class_name):
        out += f"_{letter}" if letter.isupper() and before.islower() else letter
    return out.lower()


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a message: the nearest known names, and all of them."""
    known = list(known)
    close = difflib.get_close_matches(name[:_LONGEST_NAME], known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    return f"{hint} Known are: {', '.join(known) or 'none'}"


def _implements_hook(cls: type) -> bool:
    return any(hasattr(value, "kvpolicy_impl") for value in vars(cls).values())


def _build(name: str, cls: type, knobs: dict[str, Any]) -> object:
    known = _knob_names(cls)
    for knob in knobs:
        if known is not None and knob not in known:
            msg = f"policy '{name}' has no knob '{knob}'{nearest(knob, known)}"
            raise KnobError(msg)
    try:
        return cls(**knobs)
    except KVPolicyError:
        raise
    except Exception as error:
        # Of what validators of attrs say, the first argument is the sentence.
        is_sentence = isinstance(error, (TypeError, ValueError)) and error.args
        reason = error.args[0] if is_sentence else error_summary(error)
        msg = f"policy '{name}' refuses its knobs: {reason}. See `kvpolicy list`"
        raise KnobError(msg) from error


def _knob_names(cls: type) -> Sequence[str] | None:
    """Names of the knobs a class takes; ``None`` if it takes any, or nobody can tell."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "unknown package"


def _info(point: EntryPoint) -> PolicyInfo:
    info = PolicyInfo(point.name, point.value, _distribution(point))
    try:
        found = describe(point.module, point.attr)
    except (LookupError, SyntaxError, OSError, ValueError) as error:
        return attrs.evolve(info, problem=str(error))
    return attrs.evolve(info, summary=found.summary, knobs=found.knobs)


def _file_info(name: str, path: Path) -> PolicyInfo:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = Description("", ())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and snake_case(node.name) == name:
            found = describe_class(node)
    return PolicyInfo(name, str(path), summary=found.summary, knobs=found.knobs)
