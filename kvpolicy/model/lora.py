"""LoRA adapters in PEFT's format: their weights are added to those of their model, once.

``W + scale * B @ A`` is a weight as any other, so nothing else has to know of the adapter. What an
adapter's files ask for beyond this sum is refused.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kvpolicy.errors import ModelError
from kvpolicy.files import read_json
from kvpolicy.model.libraries import cannot_load

CONFIG = "adapter_config.json"

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of PEFT, before a module's name in the model
_A, _B = ".lora_A.weight", ".lora_B.weight"
_INSTEAD = "load its model with PEFT, merge them by merge_and_unload(), and save the result."

# Settings of PEFT under which an adapter's factors alone do not say what it adds.
_OTHERWISE = (
    *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "fan_in_fan_out"),
    *("layer_replication", "rank_pattern", "use_dora", "use_qalora"),
)


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter, and no model of its own."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path, name: str | Path) -> str:
    """The model that an adapter is for, as its configuration names it.

    Args:
        folder: The folder of the adapter.
        name: What the user named.

    Raises:
        ModelError: It is no adapter that can be merged, or names no model.
    """
    base = _config(folder, name).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise cannot_load(name, f"it is an adapter, and its {CONFIG} names no base model.")
    return base


@torch.no_grad()
def merge_adapter(model: nn.Module, folder: Path, name: str | Path) -> None:
    """Add an adapter to the weights of its model, in place.

    The sum is computed in float32 and rounded to the model's precision.

    Args:
        model: The model; it is undefined after an error.
        folder: The folder of the adapter.
        name: What the user named.

    Raises:
        ModelError: The adapter is damaged, or for another model, or does more than to add.
    """
    config = _config(folder, name)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise cannot_load(name, f"its {CONFIG} has no rank `r` with a `lora_alpha`; {_INSTEAD}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    factors = _factors(folder, name)
    modules = dict(model.named_modules())
    for key in sorted(one.removesuffix(_A) for one in factors if one.endswith(_A)):
        a, b = factors.pop(key + _A), factors.pop(key + _B, None)  # [r, in] and [out, r]
        module = modules.get(key.removeprefix(_PREFIX))
        if b is None or not isinstance(module, nn.Linear):
            factors[key + _A] = a
            break
        if (b.shape[0], a.shape[1]) != module.weight.shape or {a.shape[0], b.shape[1]} != {rank}:
            expected = tuple(module.weight.shape)
            reason = (
                f"its factors of {key.removeprefix(_PREFIX)}, {tuple(b.shape)} by "
                f"{tuple(a.shape)}, are not of rank {rank} for a weight of {expected}; it is for "
                "another model than the one that it names."
            )
            raise cannot_load(name, reason)
        if sum(getattr(one, "weight", None) is module.weight for one in modules.values()) > 1:
            reason = f"it changes {key.removeprefix(_PREFIX)}, whose weight other modules share; "
            raise cannot_load(name, reason + _INSTEAD)
        delta = scale * (b.float() @ a.float()).to(module.weight.device)
        module.weight.copy_(module.weight.float() + delta)
    if factors:
        reason = f"it has weights that are no factors for its model, such as {min(factors)}; "
        raise cannot_load(name, reason + _INSTEAD)


def _config(folder: Path, name: str | Path) -> Mapping[str, Any]:
    config = read_json(folder / CONFIG, f"{CONFIG} of model '{name}'", error=ModelError)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        found = "of no known kind" if kind is None else f"of kind {kind}"
        raise cannot_load(name, f"it is an adapter {found}, and only LORA is merged; {_INSTEAD}")
    for setting in _OTHERWISE:
        if config.get(setting):
            raise cannot_load(name, f"it is an adapter with `{setting}`; {_INSTEAD}")
    return config


def _factors(folder: Path, name: str | Path) -> dict[str, Tensor]:
    path = folder / _WEIGHTS
    if not path.is_file():
        raise cannot_load(name, f"it is an adapter without its {_WEIGHTS}.")
    try:
        return load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        reason = f"its file {_WEIGHTS} is cut or damaged ({error}); download it again."
        raise cannot_load(name, reason) from error
