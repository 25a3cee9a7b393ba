"""Why the code of a model does not run a forward of ours, where more can be said than its error."""

import inspect

from torch import nn
from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError, ModelError, error_text, type_name
from kvpolicy.model.decoder import decoder_of

# What every forward of ours gives; a model may want no more than these.
_GIVEN = {"self", "input_ids", "position_ids", "attention_mask", "past_key_values", "cache"}


def explained(model: PreTrainedModel, error: Exception) -> Exception:
    """What is to be raised for a forward that has failed.

    Args:
        model: The model, whose forward of a few tokens of text has failed.
        error: What it raised, or what we raised because of what it did.

    Returns:
        A `ModelError` with the reason, or the error itself if that says it.
    """
    is_ours = isinstance(error, KVPolicyError)
    if is_ours and not isinstance(error, ModelError):
        return error
    if missing := _missing(model):
        needed = " and ".join(missing)
        reason = f"its forward needs {needed} beside tokens, so it runs no text alone"
    elif not _asks_for_attention(decoder_of(model)):
        reason = (
            "it computes its attention itself, and not with the function that transformers passes "
            "to its layers"
        )
    elif is_ours:
        return error
    elif not _takes_caches(model):
        reason = "its code takes no cache but one of its own class"
    else:
        reason = f"a forward of a few tokens of text fails: {error_text(error) or type_name(error)}"
    return ModelError(f"model {type(model).__name__} cannot be run: {reason}")


def _missing(model: PreTrainedModel) -> list[str]:
    """Arguments without which the forward of a model is not called."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind == one.POSITIONAL_OR_KEYWORD
        if one.name not in _GIVEN
    ]


def _takes_caches(model: PreTrainedModel) -> bool:
    """Whether `generate` gives a model a cache of transformers."""
    takes = getattr(type(model), "_supports_default_dynamic_cache", None)
    return takes is None or bool(takes())


def _asks_for_attention(decoder: nn.Module) -> bool:
    """Whether the code of a decoder asks transformers for its attention function.

    transformers tells by a look at the source, which is right for its own models.
    """
    asks = getattr(type(decoder), "_can_set_attn_implementation", None)
    return asks is None or bool(asks())
