"""What users call a model: wrappers of `torch.compile` and PEFT are looked through, others refused.

PEFT puts its adapters into the layers of the model, where the twin finds them. Adapters that do
more than that are refused: those that add learned vectors to the prompt, and those that need to
know which row or which token they compute, because the engine runs rows in its own order.
"""

import sys
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedConfig, PreTrainedModel

from kvpolicy.errors import ModelError


def unwrapped(model: Any) -> PreTrainedModel:
    """The model itself.

    Args:
        model: What the user gave for a model.

    Raises:
        ModelError: If it is none, or wrapped in a way that changes how it is called.
    """
    model = uncompiled(_without_peft(uncompiled(model)))
    is_module = isinstance(model, nn.Module)
    if is_module and isinstance(getattr(model, "config", None), PreTrainedConfig):
        return model
    given = type(model).__name__ if is_module else " ".join(repr(model)[:60].split())
    advice = "load it first: model, tokenizer = load_model(NAME)"
    if is_module and isinstance(getattr(model, "module", None), PreTrainedModel):
        advice = "it splits batches over devices; give the model that it wraps, its .module"
    msg = f"the engine was given {given} for a model; {advice}"
    raise ModelError(msg)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has layers of PEFT."""
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def row_arguments(model: PreTrainedModel) -> list[str]:
    """Arguments for single rows, such as ``adapter_names``, that PEFT has given to its layers.

    It registers a hook with these arguments for the length of a forward or of `generate`.
    """
    if not hasattr(model, "peft_config"):
        return []
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return sorted(
        {
            name
            for hook in hooks
            if isinstance(hook, partial) and hook.func.__module__.startswith("peft.")
            for name in hook.keywords
        }
    )


def replaced_forward(model: PreTrainedModel) -> str:
    """What to add to an error if a ``forward`` is a function that no twin can be bound to.

    Then a module of the original runs, without the cache and the attention of the twin.
    """
    for name, module in model.named_modules():
        forward = uncompiled(vars(module).get("forward"))
        if forward is not None and not isinstance(forward, (MethodType, partial)):
            where = f"model.{name}" if name else "model"
            return f"; {where}.forward was replaced by a function that calls the original"
    return ""


# Types of adapters that run forwards of their own, or need an argument for each row.
_DYNAMIC_ADAPTERS = {"POLY", "SHADOW", "XLORA"}


def _without_peft(model: Any) -> Any:
    """The model in the wrapper of PEFT, if it has one."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        kind, reason = config.peft_type.value, None
        if config.is_prompt_learning:
            reason = "puts learned vectors before the prompt, and policies need token ids"
        elif kind in _DYNAMIC_ADAPTERS or getattr(config, "alora_invocation_tokens", None):
            reason = "treats rows or tokens differently, and the engine runs them in its own order"
        if reason is not None:
            msg = (
                f"model {type(model).__name__} cannot be run: its adapter '{name}' ({kind}) "
                f"{reason}; use one that changes weights alone, such as LoRA"
            )
            raise ModelError(msg)
    peft = sys.modules.get("peft")  # imported by whoever has made such a model
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model
    return model.base_model.model


def uncompiled(value: Any) -> Any:
    """A module or function as it was before `torch.compile`, anything else unchanged.

    Compiled code calls the modules of the original, not those of a twin.
    """
    if isinstance(value, OptimizedModule):
        return uncompiled(value._orig_mod)
    return getattr(value, "_torchdynamo_orig_callable", value)
