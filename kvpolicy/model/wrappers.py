"""What users call a model: a wrapper of `torch.compile` is looked through, others are refused."""

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
    model = uncompiled(model)
    is_module = isinstance(model, nn.Module)
    if is_module and isinstance(getattr(model, "config", None), PreTrainedConfig):
        return model
    given = type(model).__name__ if is_module else " ".join(repr(model)[:60].split())
    advice = "load it first: model, tokenizer = load_model(NAME)"
    if is_module and isinstance(getattr(model, "module", None), PreTrainedModel):
        advice = "it splits batches over devices; give the model that it wraps, its .module"
    msg = f"the engine was given {given} for a model; {advice}"
    raise ModelError(msg)


def uncompiled(value: Any) -> Any:
    """A module or function as it was before `torch.compile`, anything else unchanged.

    Compiled code calls the modules of the original, not those of a twin.
    """
    if isinstance(value, OptimizedModule):
        return uncompiled(value._orig_mod)
    return getattr(value, "_torchdynamo_orig_callable", value)
