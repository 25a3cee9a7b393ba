"""Names that installed packages register: policies, models, tasks, commands, plans and others.

An entry point of a group maps a name that users type either to an object (`load_installed`)
or to a package whose folder holds the file ``NAME`` with the suffix of the group
(`installed_file`). Listing the names of a group imports none of the packages.
"""

import ast
import difflib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, EntryPoint
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.plugin_code import plugin_code

DEFAULTS = "kvpolicy.defaults"

_log = logging.getLogger(__name__)

_LONGEST_NAME = 100  # a longer string is not a misspelt name; comparing it takes seconds


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, in alphabetical order.

    Of several with one name it has the first; `conflict` tells.
    """
    return {name: points[0] for name, points in _points(group).items()}


def conflict(group: str, name: str) -> str | None:
    """Which packages register different objects under one name, or ``None``."""
    points = _points(group).get(name, ())
    if len(points) < 2:
        return None
    owners = " and ".join(f"{distribution(point)} ({point.value})" for point in points)
    return f"is registered by {owners}; uninstall one of them"


def _points(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    folders = tuple((path, _last_change(path)) for path in sys.path)
    return _read_installed(group, importlib.metadata.entry_points, folders)


@lru_cache
def _read_installed(
    group: str, entry_points: Callable[..., Iterable[EntryPoint]], _folders: object
) -> dict[str, tuple[EntryPoint, ...]]:
    """Read the metadata of all packages again only after a folder of `sys.path` has changed.

    Reading takes milliseconds, and a plan looks up each of its policies several times.
    """
    found: dict[str, dict[str, EntryPoint]] = {}
    try:
        points = entry_points(group=group)
    except Exception:  # of one package, which does not break the others
        points = _readable(group)
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        found.setdefault(point.name, {}).setdefault(point.value, point)
    return {name: tuple(by_value.values()) for name, by_value in found.items()}


def _readable(group: str) -> list[EntryPoint]:
    """The entry points of a group, without packages whose list cannot be read."""
    points: dict[str, list[EntryPoint]] = {}
    for package in importlib.metadata.distributions():
        name = str(package.metadata["Name"])
        if name in points:  # further back on the path
            continue
        points[name] = []
        try:
            points[name] = list(package.entry_points.select(group=group))
        except Exception as error:
            _log.warning(
                "entry_points.txt of the installed package %s cannot be read (%s); install it "
                "again, or uninstall it",
                name,
                error_summary(error),
            )
    return [point for of_one in points.values() for point in of_one]


def _last_change(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def find_installed(
    group: str, name: str, *, what: str, error: type[KVPolicyError] = KVPolicyError
) -> EntryPoint:
    """Look up one entry point.

    Args:
        group: Group of entry points.
        name: What the user typed.
        what: What the group registers, for messages: ``"task"``.
        error: Exception to raise.

    Raises:
        KVPolicyError: No entry point has this name, and the message lists the nearest ones; or
            several packages register it.
    """
    points = installed(group)
    if name not in points:
        msg = f"no {what} is named '{name}'{nearest(name, points)}"
        raise error(msg)
    several = conflict(group, name)
    if several is not None:
        msg = f"{what} '{name}' {several}"
        raise error(msg)
    return points[name]


def load_installed(
    group: str, name: str, *, what: str, error: type[KVPolicyError] = KVPolicyError
) -> Any:
    """Import the object that an entry point names; arguments as for `find_installed`.

    Raises:
        KVPolicyError: No entry point has this name, or its object cannot be imported.
    """
    point = find_installed(group, name, what=what, error=error)
    where = f"{what} '{name}' ({point.value}, {distribution(point)})"
    is_imported = point.value.partition(":")[0].strip() in sys.modules
    with plugin_code(f"{where} cannot be imported", error, imports=not is_imported):
        return point.load()


def installed_file(
    group: str,
    name: str,
    *,
    suffix: str,
    what: str,
    error: type[KVPolicyError] = KVPolicyError,
) -> Path:
    """Path of the file that a package registers under a name.

    Args:
        group: Group of entry points.
        name: What the user typed.
        suffix: Suffix of the files of this group, with the dot.
        what: What such a file is, for messages.
        error: Exception to raise.

    Raises:
        KVPolicyError: No entry point has this name, or its package cannot be imported.
    """
    point = find_installed(group, name, what=what, error=error)
    problem = f"{what} '{name}' is broken: its package {point.value} cannot be imported"
    with plugin_code(problem, error, imports=True):
        folder = files(point.value)
    return Path(str(folder / f"{name}{suffix}"))


def default_name(
    kind: Literal["model", "plan", "policy", "eviction_policy", "task", "sweep"],
) -> str | None:
    """The name that commands use when none is given; ``None`` if no package sets a default.

    An entry point of the group ``kvpolicy.defaults`` points to a string:
    ``model = "package.module:DEFAULT_MODEL"``.

    Args:
        kind: ``"policy"`` is the one of the full cache, ``"eviction_policy"`` one that evicts,
            ``"plan"`` that of the default model.
    """
    if kind not in installed(DEFAULTS):
        return None
    try:
        name = load_installed(DEFAULTS, kind, what="default")
    except KVPolicyError:  # a broken package must not break every command
        return None
    return name if isinstance(name, str) else None


def module_and_name(point: EntryPoint) -> tuple[str, str]:
    """The module of an entry point's object, and its name there.

    Raises:
        LookupError: The entry point is not of the form ``MODULE:NAME``.
    """
    found = re.fullmatch(r"([\w.]+)\s*:\s*([\w.]+)", point.value)
    if found is None:
        msg = f"its entry point is '{point.value}'; it should be MODULE:NAME"
        raise LookupError(msg)
    return found[1], found[2]


def parse_module(module: str) -> ast.Module:
    """Parse the source of a module without importing it or its parent packages.

    Raises:
        LookupError: There is no such module, or its file cannot be read or parsed.
    """
    try:
        return _parse_module(module)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        msg = f"module '{module}' cannot be read: {error_summary(error)}"
        raise LookupError(msg) from error


def _parse_module(module: str) -> ast.Module:
    spec: ModuleSpec | None = None
    path = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        # `importlib.util.find_spec` would import the parent packages.
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next(filter(None, found), None)
        if spec is None:
            break
        path = spec.submodule_search_locations
    if spec is None or spec.origin is None:
        msg = f"there is no module '{module}'"
        raise LookupError(msg)
    return _parse_file(spec.origin, _last_change(spec.origin))


@lru_cache(maxsize=256)  # each engine asks for the knobs of its plugins
def _parse_file(path: str, last_change: int) -> ast.Module:
    return ast.parse(Path(path).read_bytes())


def distribution(point: EntryPoint) -> str:
    """Name and version of the distribution that registers an entry point."""
    return _name_and_version(point.dist) if point.dist else "unknown package"


def packages_of(group: str, owner: str) -> frozenset[str]:
    """Top-level packages in which a distribution registers entry points of a group."""
    return frozenset(
        point.module.partition(".")[0]
        for points in _points(group).values()
        for point in points
        if distribution(point).split()[0] == owner
    )


@lru_cache(maxsize=256)  # reading them parses a file of a hundred lines
def _name_and_version(distribution: Distribution) -> str:
    return f"{distribution.name} {distribution.version}"


def nearest(name: str, known: Iterable[str]) -> str:
    """End of a message about an unknown name: the nearest known names, and all of them."""
    known = list(known)
    close = difflib.get_close_matches(name[:_LONGEST_NAME], known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    return f"{hint} Known are: {', '.join(known) or 'none'}"
