"""A resolved plan for readers: layers that are alike stand together."""

import json
from collections.abc import Sequence
from typing import Any


def alike(resolved: dict[str, Any]) -> list[dict[str, Any]]:
    """What the layers of a plan do, those that do the same in one entry.

    Args:
        resolved: A resolved plan as plain data, see `ResolvedPlan.to_dict`.

    Returns:
        In the order of first layers: ``layers`` in words, ``budget``, ``buffer``, ``stack`` as
        ``{"policy", "knobs"}``, and ``more``, what else is said.
    """
    kinds: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for number, layer in enumerate(resolved.get("layers", [])):
        said = {name: value for name, value in layer.items() if name != "layer"}
        key = json.dumps(said, sort_keys=True)
        kinds.setdefault(key, (said, []))[1].append(layer.get("layer", number))
    return [_entry(said, numbers) for said, numbers in kinds.values()]


def rest_of(resolved: dict[str, Any]) -> dict[str, Any]:
    """What a plan says beside its layers, as far as it says anything."""
    return {name: value for name, value in resolved.items() if name != "layers" and value}


def _entry(said: dict[str, Any], numbers: list[int]) -> dict[str, Any]:
    known = ("stack", "budget", "buffer")
    stack = [
        {
            "policy": spec.get("policy", ""),
            "knobs": {name: value for name, value in spec.items() if name != "policy"},
        }
        for spec in said.get("stack", [])
    ]
    return {
        "layers": ranges(numbers),
        "budget": said.get("budget"),
        "buffer": said.get("buffer"),
        "stack": stack,
        "more": {name: value for name, value in said.items() if name not in known},
    }


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in words, such as ``"0 to 3, 7"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(" to ".join(map(str, run)) for run in runs)
