"""Sizes of ``kvpolicy bench``: what the user gave, and defaults that depend on what is measured."""

from collections.abc import Mapping
from typing import Any

from kvpolicy.errors import KVPolicyError

# By option: the default, and the default with --quick.
_DEFAULTS: Mapping[str, tuple[Any, Any]] = {
    "shape": ("100m", "tiny"),
    "batch": (8, 4),
    "steps": (16, 8),
    "prompt_min": (64, 16),
    "prompt_max": (256, 48),
    "new_tokens": (2048, 256),
    "budget": (512, 48),
    "buffer": (128, 16),
    "rounds": (5, 3),
    "lengths": ([512, 2048, 4096, 8192, 16_384], [64, 128]),
    "memory_limit": (1.0, 0.002),
    "prefill": ([4096, 32_768], [64, 128]),
    "batches": ([32, 1, 8], [4, 1]),
}
# Defaults of other workloads.
_OF_MEMORY = {"shape": "5m", "lengths": [1000, 2000, 5000, 10_000, 20_000]}
_AT_ACCURACY = {"lengths": [4096]}
_OF_LAUNCHES = {"shape": "host", "lengths": [2048], "buffer": 16}
_OF_MAX_BATCH = {"lengths": [4096]}
_ONCE = {"rounds": 1}
_OF_GPU = {"shape": "qwen3-8b", "budget": 1024, "lengths": [8704], "steps": 48, **_ONCE}
_OF_MODES: Mapping[str, Mapping[str, Any]] = {
    "memory": _OF_MEMORY,
    "launches": _OF_LAUNCHES,
    "max_batch": _OF_MAX_BATCH,
    "gpu": _OF_GPU,
}
_OF_ONE_LENGTH = ("max_batch", "launches", "gpu")
# Sizes that not all workloads have, with those that have them.
_READ_BY: Mapping[str, tuple[str, ...]] = {
    "batch": ("decode", "text", "launches"),
    "steps": ("decode", "max_batch", "gpu"),
    "prompt_min": ("text", "memory"),
    "prompt_max": ("text", "memory"),
    "new_tokens": ("text",),
    "rounds": ("decode", "text", "max_batch", "gpu"),
    "lengths": ("decode", "max_batch", "memory", "launches", "gpu"),
    "memory_limit": ("max_batch", "gpu"),
    "prefill": ("gpu",),
    "batches": ("gpu",),
}


def choose_sizes(mode: str, *, at_accuracy: bool, quick: bool, **given: Any) -> dict[str, Any]:
    """The sizes that the user gave, and defaults for the others."""
    preferred = _AT_ACCURACY if at_accuracy else {}
    of_mode: Mapping[str, Any] = _OF_MODES.get(mode, preferred)
    if quick:
        of_mode = _ONCE if mode == "gpu" else {}
    sizes = {
        name: given[name] or of_mode.get(name, default[quick])
        for name, default in _DEFAULTS.items()
    }
    if quick and mode in _OF_ONE_LENGTH and not given["lengths"]:
        sizes["lengths"] = sizes["lengths"][-1:]
    if mode in _OF_ONE_LENGTH and len(sizes["lengths"]) > 1:
        msg = f"--{mode.replace('_', '-')} fills caches to one length; give one with --lengths."
        raise KVPolicyError(msg)
    for name in ("prefill", "batches"):
        if given[name] and mode != "gpu":
            msg = f"--{name} says what --gpu measures; leave it out, or give --gpu, too."
            raise KVPolicyError(msg)
    if sizes["prompt_max"] < sizes["prompt_min"]:
        msg = f"--prompt-max {sizes['prompt_max']} is below --prompt-min {sizes['prompt_min']}."
        raise KVPolicyError(msg)
    return sizes


def without_effect(mode: str, **given: Any) -> str | None:
    """Say which of the sizes that the user gave change nothing; ``None`` if all are read."""
    names = [
        f"--{name.replace('_', '-')}"
        for name, modes in _READ_BY.items()
        if given[name] and mode not in modes
    ]
    if not names:
        return None
    what = "decode steps" if mode == "decode" else f"what --{mode.replace('_', '-')} measures"
    return f"{' and '.join(names)}: no part of {what}, so that nothing changes by it"


def positions_needed(mode: str, sizes: Mapping[str, Any]) -> int:
    """Positions that the model needs, with room for steps that are rounded up to whole buffers."""
    generated = {"text": sizes["new_tokens"], "memory": max(sizes["lengths"])}
    held = 0 if mode in generated else max(sizes["lengths"])
    rounded = 2 * max(sizes["steps"], sizes["buffer"]) + 256
    longest = sizes["prompt_max"] + held + generated.get(mode, rounded) + 64
    return int(max(longest, *sizes["prefill"])) + 1 if mode == "gpu" else int(longest)
