"""Changes to what a plan file holds, as the command line gives them: ``budget=96``."""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvpolicy.errors import PlanError
from kvpolicy.hooks.discovery import nearest
from kvpolicy.plan import extends


def override(raw: dict[str, Any], change: str, name: str) -> None:
    """Change one entry of what a plan file holds, in place.

    Args:
        raw: Lists and tables of the file.
        change: ``KEY=VALUE``, ``layers.N.KEY=VALUE`` or ``POLICY.KNOB=VALUE``; the value is
            read as TOML, and what is no TOML is text.
        name: Name of the plan, for messages.

    Raises:
        PlanError: If it changes nothing that the plan has.
    """
    if not isinstance(change, str):
        msg = f"{change!r:.60} is no change of a plan; write a text such as 'budget=96'"
        raise PlanError(msg)
    path, equals, text = change.partition("=")
    if not equals or not all(key.strip() for key in path.split(".")):
        msg = f"--set {change!r} is not KEY=VALUE; write for example budget=96"
        raise PlanError(msg)
    assign(raw, path, value_of(text), name, said=f"--set {change!r}")


def assign(raw: dict[str, Any], path: str, value: object, name: str, *, said: str) -> None:
    """Give one entry of what a plan file holds another value, in place.

    Args:
        raw: Lists and tables of the file.
        path: ``KEY``, ``layers.N.KEY`` or ``POLICY.KNOB``.
        value: What it is from now on.
        name: Name of the plan, for messages.
        said: How the user asked for it, for messages.

    Raises:
        PlanError: If it changes nothing that the plan has.
    """
    keys = [key.strip() for key in path.split(".")]
    if keys == [extends.KEY]:
        msg = f"{said}: what a plan extends is said in its file; override its keys"
        raise PlanError(msg)
    if len(keys) == 1:
        raw[keys[0]] = value
    elif keys[0] == "layers" and len(keys) == 3:
        groups = _groups(raw)
        place = int(keys[1]) if keys[1].isdecimal() and len(keys[1]) < 9 else len(groups)
        if place >= len(groups):
            msg = f"{said}: {name} has {len(groups)} [[layers]] groups, from 0"
            raise PlanError(msg)
        groups[place][keys[2]] = value
    elif len(keys) == 2:
        _set_knob(raw, keys[0], keys[1], value, said, name)
    else:
        msg = f"{said}: write KEY=, layers.N.KEY= or POLICY.KNOB="
        raise PlanError(msg)


def value_of(text: str) -> object:
    """What a user typed as a value: TOML, or a text where it is none.

    Args:
        text: Such as ``"0.5"``, ``"true"``, ``"[1, 2]"`` or ``"mean"``.
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text.strip()


def _groups(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of layers; none if they are malformed, which is told later."""
    groups = raw.get("layers")
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        return groups
    return []


def _set_knob(
    raw: dict[str, Any], policy: str, knob: str, value: object, said: str, name: str
) -> None:
    found = [entry for entry in _entries(raw) if entry.name == policy]
    if not found:
        hint = nearest(policy, sorted(set(policies_named(raw))))
        msg = f"{said}: {name} uses no policy '{policy}'{hint}"
        raise PlanError(msg)
    for entry in found:
        entry.listed[entry.place] = {**entry.spec, knob: value}


@attrs.frozen
class _Entry:
    """Where a policy is named: an entry of a list, with its knobs."""

    listed: list[Any]
    place: int
    spec: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.spec["policy"])


def policies_named(raw: Mapping[str, Any]) -> list[str]:
    """Names of the policies of a plan, those inside of others among them; some more than once.

    Args:
        raw: Lists and tables of the file; what is malformed names none.
    """
    return [entry.name for entry in _entries(raw)]


def _entries(raw: Mapping[str, Any]) -> list[_Entry]:
    stacks = [table.get("stack") for table in [raw, *_groups(raw)]]
    return [entry for listed in [*stacks, raw.get("schedule")] for entry in _listed(listed)]


def _listed(listed: object) -> Iterator[_Entry]:
    """The policies of a stack; what a knob of theirs lists may be policies in turn."""
    if not isinstance(listed, list):
        return  # a stack that is none is refused with a better message when it is structured
    for place, entry in enumerate(listed):
        spec = entry if isinstance(entry, dict) else {"policy": entry}
        for inner in spec.values():
            yield from _listed(inner)
        if isinstance(spec.get("policy"), str):
            yield _Entry(listed, place, spec)
