"""Plans that say what differs from another: ``extends = "base.toml"``.

A key of the plan replaces the same key of what it extends, whole: `layers`, `stack` and
`schedule` are not merged entry by entry. Nobody has to work out what half of a list means.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpolicy.errors import KVPolicyError, PlanError
from kvpolicy.hooks.bundled import bundled_file

GROUP = "kvpolicy.plans"
KEY = "extends"


def read(name_or_path: str | Path) -> dict[str, Any]:
    """Read a TOML file, or the one that a package brings along under a name, and its bases.

    Raises:
        PlanError: If a file cannot be read or is no TOML, or the plan extends itself.
    """
    return _read(_find(Path(name_or_path), Path()), ())


def merged(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A plan given as data, with what it extends; paths start in the working folder."""
    return _merged(data, Path(), (), name)


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file that the last one of a chain of files extends."""
    if _resolved(path) in map(_resolved, chain):
        names = " -> ".join(f"'{one}'" for one in (*chain, path))
        msg = f"plan '{chain[0]}' extends itself: {names}; take one {KEY} out"
        raise PlanError(msg)
    name = f"plan '{path}'"
    data = _load(path, f"{name}, which '{chain[-1]}' extends," if chain else name)
    return _merged(data, path.parent, (*chain, path), name)


def _merged(
    data: Mapping[str, Any], folder: Path, chain: tuple[Path, ...], name: str
) -> dict[str, Any]:
    if KEY not in data:
        return dict(data)
    base = data[KEY]
    if not isinstance(base, str) or not base:
        msg = f'{name}: {KEY} is {base!r:.60}; write the name of one plan, {KEY} = "base.toml"'
        raise PlanError(msg)
    own = {key: value for key, value in data.items() if key != KEY}
    try:
        path = _find(Path(base), folder)
    except PlanError as error:
        msg = f"{name} extends '{base}', but {error}"
        raise PlanError(msg) from error
    return _read(path, chain) | own


def _load(path: Path, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"{name} cannot be read: {error.strerror or error}"
        raise PlanError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{name} is not UTF-8 text"
        raise PlanError(msg) from error
    except tomllib.TOMLDecodeError as error:
        msg = f"{name} is not TOML: {error}"
        raise PlanError(msg) from error
    except (ValueError, RecursionError) as error:
        # A name with a NUL, a number of thousands of digits, brackets within brackets.
        msg = f"{name} cannot be read: {error}"
        raise PlanError(msg) from error


def _find(path: Path, folder: Path) -> Path:
    """A file, relative to the folder of who names it, or the file of an installed plan."""
    file = folder / path
    if path.suffix or len(path.parts) > 1 or _is_file(file):
        return file
    try:
        return bundled_file(GROUP, str(path), suffix=".toml", what="plan")
    except KVPolicyError as error:
        msg = f"{error}; a plan in a file is named with its ending, as in plan.toml"
        raise PlanError(msg) from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except ValueError:
        return False


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):
        return path
