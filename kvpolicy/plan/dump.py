"""Writing a resolved plan as one that can be loaded again: it comes to the same, digest and all."""

import json
import math
from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.errors import PlanError
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan
from kvpolicy.plan.spec import PolicySpec


def to_plan_data(resolved: ResolvedPlan) -> dict[str, Any]:
    """What a plan file would hold that comes to this resolved plan.

    Layers that are alike are one group, unless that would change what they do: policies may
    share the budgets of a group's layers among them.

    Args:
        resolved: The plan.

    Returns:
        Plain data, for `Plan.from_dict`, TOML or JSON.

    Raises:
        PlanError: If a policy was made in Python, or has a knob that no file can hold.
    """
    for groups in (_alike(resolved.layers), [[layer] for layer in resolved.layers]):
        written = _data(resolved, groups)
        if Plan.from_dict(written).resolve(len(resolved.layers)).digest() == resolved.digest():
            return written
    msg = f"{resolved.name} has a knob that is None, which a plan file cannot say; leave it out"
    raise PlanError(msg)


def to_toml(resolved: ResolvedPlan) -> str:
    """A resolved plan as a TOML file; see `to_plan_data` for the errors."""
    data = to_plan_data(resolved)
    name = " ".join(resolved.name.split())
    lines = [f"# {name}, resolved for {len(resolved.layers)} layers"]
    lines += [f"# digest {resolved.digest()}"]
    lines += [f"{key} = {_value(value)}" for key, value in data.items() if key != "layers"]
    for group in data["layers"]:
        first = resolved.layers[0 if group["where"] == "all" else group["where"][0]]
        lines += ["", "[[layers]]"]
        for key, value in group.items():
            share = first.budget_from if key == "budget" else None
            lines.append(f"{key} = {_value(value)}" + (f" # {share}" if share else ""))
    return "\n".join(lines) + "\n"


def _alike(layers: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
    groups: list[list[LayerPlan]] = []
    for layer in layers:
        for group in groups:
            if attrs.evolve(group[0], layer_idx=layer.layer_idx) == layer:
                group.append(layer)
                break
        else:
            groups.append([layer])
    return groups


def _data(resolved: ResolvedPlan, groups: Sequence[Sequence[LayerPlan]]) -> dict[str, Any]:
    head: dict[str, Any] = {}
    if resolved.schedule:
        head["schedule"] = [_policy(spec) for spec in resolved.schedule]
    if resolved.padding != "none":
        head["padding"] = resolved.padding
    return head | {"layers": [_group(group, len(resolved.layers)) for group in groups]}


def _group(layers: Sequence[LayerPlan], num_layers: int) -> dict[str, Any]:
    first = layers[0]
    everywhere = len(layers) == num_layers
    where = "all" if everywhere else [layer.layer_idx for layer in layers]
    said = {"where": where, "stack": [_policy(spec) for spec in first.stack]}
    budget = {} if first.budget is None else {"budget": first.budget}
    return said | budget | {"buffer": first.buffer}


def _policy(spec: PolicySpec) -> dict[str, Any]:
    if spec.instance is not None:
        msg = (
            f"policy '{spec.policy}' was made in Python and cannot be written into a plan file; "
            "install it under a name, or give its file with --plugin, and name it"
        )
        raise PlanError(msg)
    # TOML has no null. A knob that is None takes its default, which is checked on the way back.
    knobs = {knob: value for knob, value in spec.knobs.items() if value is not None}
    return {"policy": spec.policy} | {knob: _plain(value, spec) for knob, value in knobs.items()}


def _plain(value: object, spec: PolicySpec) -> object:
    if isinstance(value, (bool, int, float)) or (isinstance(value, str) and _is_text(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(one, spec) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(one, spec) for key, one in value.items()}
    msg = f"policy '{spec.policy}' has a knob {value!r:.60}, which a plan file cannot hold"
    raise PlanError(msg)


def _is_text(value: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _value(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(float(value))
    if isinstance(value, str):
        # The escapes of JSON are TOML's, too, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return str(int(value))


def _key(key: str) -> str:
    is_bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if is_bare else _value(key)
