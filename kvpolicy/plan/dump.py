"""Writing a resolved plan as a plan file that resolves to the same plan and digest."""

import json
import math
from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.errors import PlanError
from kvpolicy.plan.plan import Plan, default_prefill_buffer
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan
from kvpolicy.plan.spec import PLAIN_ROWS, PolicySpec


def to_plan_data(resolved: ResolvedPlan) -> dict[str, Any]:
    """The contents of a plan file that resolves to this plan.

    Equal layers are written as one group, unless that changes the plan: policies may distribute
    the rows of a group among its layers.

    Args:
        resolved: The plan.

    Returns:
        Plain data, for `Plan.from_dict`, TOML or JSON.

    Raises:
        PlanError: If a policy was made in Python, or has a knob that TOML cannot represent.
    """
    layers, attention = [one for one in resolved.layers if one.has_rows], resolved.attention
    for groups in (_equal_layers(layers), [[layer] for layer in layers]):
        written = _data(resolved, groups)
        again = Plan.from_dict(written).resolve(len(resolved.layers), attention=attention)
        if again.digest() == resolved.digest():
            return written
    msg = f"{resolved.name} has a knob that is None, which TOML cannot represent; leave it out"
    raise PlanError(msg)


def to_toml(resolved: ResolvedPlan) -> str:
    """A resolved plan as a TOML file; see `to_plan_data` for the errors."""
    data = to_plan_data(resolved)
    name = " ".join(resolved.name.split())
    lines = [f"# {name}, resolved for {len(resolved.layers)} layers"]
    lines += [f"# digest {resolved.digest()}"]
    lines += [f"{key} = {_value(value)}" for key, value in data.items() if key != "layers"]
    for group in data["layers"]:
        first = resolved.layers[
            resolved.attention[0] if group["where"] == "all" else group["where"][0]
        ]
        lines += ["", "[[layers]]"]
        for key, value in group.items():
            share = first.budget_from if key == "budget" else None
            lines.append(f"{key} = {_value(value)}" + (f" # {share}" if share else ""))
    return "\n".join(lines) + "\n"


def _equal_layers(layers: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
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
    return head | {"layers": [_group(group, len(resolved.attention)) for group in groups]}


def _group(layers: Sequence[LayerPlan], num_layers: int) -> dict[str, Any]:
    first = layers[0]
    where = "all" if len(layers) == num_layers else [layer.layer_idx for layer in layers]
    return {
        "where": where,
        "stack": [_policy(spec) for spec in first.stack],
        **({} if first.budget is None else {"budget": first.budget}),
        "buffer": first.buffer,
        **({} if first.prompt == "evict" else {"prompt": first.prompt}),
        **({} if first.heads == "own" else {"heads": first.heads}),
        **_prefill_buffer(first),
        **({} if first.rows == PLAIN_ROWS else {"rows": first.rows.to_plain()}),
    }


def _prefill_buffer(layer: LayerPlan) -> dict[str, int]:
    """The key, unless the plan left it open and a group with this budget has the same default."""
    if not layer.evicts:
        return {}
    assert layer.budget is not None
    rows = layer.prefill_buffer or layer.buffer
    if layer.prefill_by_default and rows == default_prefill_buffer(layer.budget, layer.buffer):
        return {}
    return {"prefill_buffer": rows}


def _policy(spec: PolicySpec) -> dict[str, Any]:
    if spec.instance is not None:
        msg = (
            f"policy '{spec.policy}' was made in Python and cannot be written into a plan file; "
            "install it under a name, or give its file with --plugin, and name it"
        )
        raise PlanError(msg)
    # TOML has no null: a knob that is None is left out, and the caller compares the digests.
    knobs = {knob: value for knob, value in spec.knobs.items() if value is not None}
    return {"policy": spec.policy} | {knob: _plain(value, spec) for knob, value in knobs.items()}


def _plain(value: object, spec: PolicySpec) -> object:
    if isinstance(value, (bool, int, float)) or (isinstance(value, str) and _is_utf8(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(one, spec) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(one, spec) for key, one in value.items()}
    msg = f"policy '{spec.policy}' has a knob {value!r:.60}, which a plan file cannot represent"
    raise PlanError(msg)


def _is_utf8(value: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _value(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(float(value))
    if isinstance(value, str):
        # TOML has the escapes of JSON, and also requires DEL to be escaped.
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
