"""Plan files: reading them with what they extend, and changing single entries.

A plan may extend another one: ``extends = "base.toml"``. A key of the plan replaces the same key
of its base as a whole; `layers`, `stack` and `schedule` are not merged entry by entry.
"""

from collections.abc import Iterator, Mapping, Sequence
from os.path import abspath
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.entry_points import installed_file, nearest
from kvpolicy.errors import PlanError
from kvpolicy.files import parse_toml, path_of, read_toml

ENTRY_POINTS = "kvpolicy.plans"
EXTENDS = "extends"


# Files


def read_file(name_or_path: str | Path) -> dict[str, Any]:
    """Read a TOML file, or an installed plan by name, merged with the plans that it extends.

    Raises:
        PlanError: If a file cannot be read, is not TOML, or the plan extends itself.
    """
    return _read(_find(path_of(name_or_path, "a plan", error=PlanError), Path()), ())


def read_tables(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Copy a plan given as data into lists and dictionaries, merged with what it extends.

    Paths are relative to the working folder.

    Args:
        data: The contents of a plan file.
        name: Name of the plan, for messages.

    Raises:
        PlanError: If it is not a table with text keys, or a base cannot be read.
    """
    if not isinstance(data, Mapping):
        msg = f"{name} was given as {data!r:.60}; give a table of its keys"
        raise PlanError(msg)
    try:
        copied: dict[str, Any] = _copy(_merge(data, Path(), (), name), name)
    except RecursionError as error:
        msg = f"{name} is nested too deeply, or a list or a table in it holds itself"
        raise PlanError(msg) from error
    return copied


def _copy(data: Any, name: str) -> Any:
    if isinstance(data, Mapping):
        for key in data:
            if not isinstance(key, str):
                msg = f"{name} has a key {key!r:.60}; keys are texts"
                raise PlanError(msg)
        return {key: _copy(value, name) for key, value in data.items()}
    return [_copy(value, name) for value in data] if isinstance(data, (list, tuple)) else data


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file; each path of ``chain`` extends the next one, and the last one this file."""
    if any(abspath(path) == abspath(one) for one in chain):
        names = " -> ".join(f"'{one}'" for one in (*chain, path))
        msg = f"plan '{chain[0]}' extends itself: {names}; remove one {EXTENDS}"
        raise PlanError(msg)
    name = f"plan '{path}'"
    what = f"{name}, which '{chain[-1]}' extends," if chain else name
    data = read_toml(path, what, error=PlanError)
    return _merge(data, path.parent, (*chain, path), name)


def _merge(
    data: Mapping[str, Any], folder: Path, chain: tuple[Path, ...], name: str
) -> dict[str, Any]:
    if EXTENDS not in data:
        return dict(data)
    base = data[EXTENDS]
    if not isinstance(base, str) or not base:
        msg = (
            f"{name}: {EXTENDS} is {base!r:.60}; write the name of one plan, "
            f'{EXTENDS} = "base.toml"'
        )
        raise PlanError(msg)
    own = {key: value for key, value in data.items() if key != EXTENDS}
    try:
        path = _find(Path(base), folder)
    except PlanError as error:
        msg = f"{name} extends '{base}', but {error}"
        raise PlanError(msg) from error
    return _read(path, chain) | own


def _find(path: Path, folder: Path) -> Path:
    """A file relative to the folder of the plan that names it, or an installed plan's file."""
    file = folder / path
    if path.suffix or len(path.parts) > 1 or file.is_file():
        return file
    try:
        return installed_file(ENTRY_POINTS, str(path), suffix=".toml", what="plan", error=PlanError)
    except PlanError as error:
        msg = f"{error}; give the file of a plan with its ending, as in plan.toml"
        raise PlanError(msg) from error


# Overrides


@attrs.frozen
class Override:
    """A change to one entry of a plan.

    Attributes:
        path: ``KEY``, ``layers.N.KEY`` or ``POLICY.KNOB``.
        value: Its new value.
        source: How the user asked for it, for messages: ``--budget 96``.
    """

    path: str
    value: object
    source: str

    @classmethod
    def read(cls, given: "str | Override") -> "Override":
        """An override, or the text of one as ``--set`` takes it.

        Args:
            given: ``KEY=VALUE``, ``layers.N.KEY=VALUE`` or ``POLICY.KNOB=VALUE``; see
                `parse_value` for the value.

        Raises:
            PlanError: If it is none of these.
        """
        if isinstance(given, Override):
            return given
        if not isinstance(given, str):
            msg = f"{given!r:.60} is not an override; write a text such as 'budget=96'"
            raise PlanError(msg)
        path, equals, text = given.partition("=")
        if not equals or not all(key.strip() for key in path.split(".")):
            msg = f"--set {given!r} is not KEY=VALUE; write for example budget=96"
            raise PlanError(msg)
        return cls(path, parse_value(text), source=f"--set {given!r}")

    @property
    def keys(self) -> tuple[str | int, ...]:
        """The path as keys and indices, as in the location of a `Problem`."""
        keys = [key.strip() for key in self.path.split(".")]
        if keys[0] == "layers" and len(keys) == 3 and keys[1].isdecimal() and len(keys[1]) < 9:
            return keys[0], int(keys[1]), keys[2]
        return tuple(keys)


def apply_override(raw: dict[str, Any], override: Override, name: str) -> None:
    """Change one entry of the tables of a plan, in place.

    Args:
        raw: Tables of the plan.
        override: The change.
        name: Name of the plan, for messages.

    Raises:
        PlanError: If it changes nothing that the plan has.
    """
    value, source, keys = override.value, override.source, override.keys
    if keys == (EXTENDS,):
        msg = f"{source}: {EXTENDS} can be set in a plan file only; override other keys"
        raise PlanError(msg)
    if len(keys) == 1:
        raw[str(keys[0])] = value
    elif keys[0] == "layers" and len(keys) == 3:
        groups = _groups(raw)
        index = keys[1]
        if not isinstance(index, int) or index >= len(groups):
            msg = f"{source}: {name} has {len(groups)} [[layers]] groups, counted from 0"
            raise PlanError(msg)
        groups[index][str(keys[2])] = value
    elif len(keys) == 2:
        policy, knob = map(str, keys)
        found = [entry for entry in _entries(raw) if entry.name == policy]
        if not found:
            hint = nearest(policy, sorted(set(policies_named(raw))))
            msg = f"{source}: {name} uses no policy '{policy}'{hint}"
            raise PlanError(msg)
        for entry in found:
            entry.stack[entry.index] = {**entry.spec, knob: value}
    else:
        msg = f"{source}: write KEY=, layers.N.KEY= or POLICY.KNOB="
        raise PlanError(msg)


def parse_value(text: str) -> object:
    """Parse a value typed by a user: as TOML, and as text if it is not TOML.

    Args:
        text: Such as ``"0.5"``, ``"true"``, ``"[1, 2]"`` or ``"mean"``.
    """
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text.strip()


def policies_named(raw: Mapping[str, Any]) -> list[str]:
    """Names of the policies of a plan, including those in knobs of others; with repetitions.

    Args:
        raw: Tables of the plan; malformed entries are skipped.
    """
    return [entry.name for entry in _entries(raw)]


@attrs.frozen
class _Entry:
    """A policy in a stack: the list, the index in it, and the policy as a table."""

    stack: list[Any]
    index: int
    spec: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.spec["policy"])


def _groups(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of layers; none if they are malformed, which reading the plan reports."""
    groups = raw.get("layers")
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        return groups
    return []


def _entries(raw: Mapping[str, Any]) -> list[_Entry]:
    stacks: Sequence[Any] = [table.get("stack") for table in [raw, *_groups(raw)]]
    return [entry for stack in [*stacks, raw.get("schedule")] for entry in _entries_of(stack)]


def _entries_of(stack: object) -> Iterator[_Entry]:
    """The policies of a stack, and those in lists among their knobs."""
    if not isinstance(stack, list):
        return
    for index, entry in enumerate(stack):
        spec = entry if isinstance(entry, dict) else {"policy": entry}
        for inner in spec.values():
            yield from _entries_of(inner)
        if isinstance(spec.get("policy"), str):
            yield _Entry(stack, index, spec)
