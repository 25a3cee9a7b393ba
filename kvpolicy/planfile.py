"""Reading plans: TOML, overrides, and every mistake answered with a sentence."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import cattrs

from kvpolicy.bundled import bundled_file
from kvpolicy.discovery import nearest
from kvpolicy.errors import KVPolicyError, PlanError
from kvpolicy.planspec import LayerGroup, PolicySpec

if TYPE_CHECKING:
    from kvpolicy.plan import Plan

GROUP = "kvpolicy.plans"


def read(name_or_path: str | Path) -> dict[str, Any]:
    """Read a TOML file, or the one that a package brings along under a name."""
    path = _find(Path(name_or_path))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        msg = f"plan '{path}' cannot be read: {error.strerror or error}"
        raise PlanError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"plan '{path}' is not UTF-8 text"
        raise PlanError(msg) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        msg = f"plan '{path}' is not TOML: {error}"
        raise PlanError(msg) from error


def _find(path: Path) -> Path:
    if path.suffix or len(path.parts) > 1 or path.is_file():
        return path
    try:
        return bundled_file(GROUP, str(path), suffix=".toml", what="plan")
    except KVPolicyError as error:
        msg = f"{error}; a plan in a file is named with its ending, as in plan.toml"
        raise PlanError(msg) from error


def structure(
    plan_class: "type[Plan]", data: Mapping[str, Any], overrides: Sequence[str], name: str
) -> "Plan":
    """Turn what a TOML file holds into a plan; unknown keys and wrong types are refused."""
    raw = _copy(data)
    for override in overrides:
        _override(raw, override, name)
    if "name" in raw:
        # Where a plan came from is told by whoever reads it, and is no key of the file.
        msg = f"{name}: unknown key 'name'"
        raise PlanError(msg)
    try:
        plan = _converter().structure(raw, plan_class)
    except cattrs.BaseValidationError as error:
        msg = f"{name}: {first_problem(error)}"
        raise PlanError(msg) from error
    return attrs.evolve(plan, name=name)


def slice_of(text: str, name: str) -> slice:
    """``"all"``, ``"0:2"``, ``"-2:"`` as a slice of the layers."""
    if text == "all":
        return slice(None)
    parts = text.split(":")
    try:
        if len(parts) not in (2, 3):
            raise ValueError
        return slice(*(int(part) if part.strip() else None for part in parts))
    except ValueError:
        msg = (
            f'{name}: where = "{text}" names no layers; write "all", a slice such as "0:2" '
            'or "-2:", or a list such as [0, 5]'
        )
        raise PlanError(msg) from None


def _copy(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _copy(value) for key, value in data.items()}
    return [_copy(value) for value in data] if isinstance(data, list) else data


def _override(raw: dict[str, Any], override: str, name: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        msg = f"--set {override!r} is not KEY=VALUE; write for example budget=96"
        raise PlanError(msg)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    if len(keys) == 1:
        raw[keys[0]] = value
    elif keys[0] == "layers" and len(keys) == 3:
        groups = _groups(raw)
        if not keys[1].isdigit() or int(keys[1]) >= len(groups):
            msg = f"--set {override!r}: {name} has {len(groups)} [[layers]] groups, from 0"
            raise PlanError(msg)
        groups[int(keys[1])][keys[2]] = value
    elif len(keys) == 2:
        _override_knob(raw, keys[0], keys[1], value, override, name)
    else:
        msg = f"--set {override!r}: write KEY=, layers.N.KEY= or POLICY.KNOB="
        raise PlanError(msg)


def _groups(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of layers; none if they are malformed, which is told later."""
    groups = raw.get("layers")
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        return groups
    return []


def _override_knob(
    raw: dict[str, Any], policy: str, knob: str, value: object, override: str, name: str
) -> None:
    stacks = [raw.get("schedule"), *(table.get("stack") for table in [raw, *_groups(raw)])]
    used = set()
    for stack in stacks:
        if not isinstance(stack, list):
            continue  # refused with a better message when the plan is structured
        for place, entry in enumerate(stack):
            spec = entry if isinstance(entry, dict) else {"policy": entry}
            used.add(spec.get("policy"))
            if spec.get("policy") == policy:
                stack[place] = {**spec, knob: value}
    if policy not in used:
        hint = nearest(policy, sorted(map(str, used)))
        msg = f"--set {override!r}: {name} uses no policy '{policy}'{hint}"
        raise PlanError(msg)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(int, lambda value, _: _integer(value))
    converter.register_structure_hook(PolicySpec, lambda value, _: _policy_spec(value))
    stacks = (tuple[PolicySpec, ...], tuple[PolicySpec, ...] | None)
    converter.register_structure_hook_func(stacks.__contains__, lambda value, _: _stack(value))
    where = attrs.fields(LayerGroup).where.type
    converter.register_structure_hook(where, lambda value, _: _where(value))
    return converter


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{value!r} is not a count; write a whole number of tokens"
        raise TypeError(msg)
    return value


def _where(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return tuple(_integer(layer) for layer in value)
    msg = f'{value!r} names no layers; write "all", a slice such as "0:2", or a list such as [0, 5]'
    raise TypeError(msg)


def _stack(value: object) -> tuple[PolicySpec, ...]:
    if isinstance(value, list):
        return tuple(_policy_spec(entry) for entry in value)
    msg = f'{value!r} is no list of policies; write for example ["NAME", "NAME"]'
    raise TypeError(msg)


def _policy_spec(value: object) -> PolicySpec:
    if isinstance(value, str):
        return PolicySpec(value)
    if isinstance(value, Mapping) and isinstance(value.get("policy"), str):
        knobs = {key: knob for key, knob in value.items() if key != "policy"}
        return PolicySpec(value["policy"], knobs)
    msg = f'{value!r} names no policy; write "NAME" or {{ policy = "NAME", KNOB = VALUE }}'
    raise TypeError(msg)


def first_problem(error: BaseException, where: str = "") -> str:
    """The first leaf of cattrs' tree of errors, as a sentence."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(error.cl) if field.name != "name"]
        key = min(error.extra_fields)
        return f"unknown key '{key}'{where}{nearest(key, known)}"
    if isinstance(error, BaseExceptionGroup):
        inner = error.exceptions[0]
        places = [str(note).rpartition(" @ ")[2] for note in getattr(inner, "__notes__", [])]
        deeper = "".join(map(_place, places))
        return first_problem(inner, where + deeper)
    return f"{where.strip()}: {error}" if where else str(error)


def _place(note: str) -> str:
    """``attribute layers`` as " in layers", ``index 0`` as "[0]"."""
    kind, _, name = note.partition(" ")
    return f"[{name}]" if kind == "index" else f" in {name}"
