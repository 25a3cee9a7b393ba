"""How a cache takes part in the forwards of a model that somebody else calls.

Two forward hooks of PyTorch: one before, one after. They look at every forward of the model,
act only on those that are given their cache, and go with it: nothing of the model is replaced,
and once the last cache is gone the model is what it was.
"""

import inspect
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

if TYPE_CHECKING:
    from kvpolicy.hf.policy_cache import PolicyCache


def attach(cache: "PolicyCache", model: PreTrainedModel) -> None:
    """Have a cache take part in the forwards of a model for as long as it lives."""
    # Whatever stands in the model's hooks must not keep the cache alive.
    reference = weakref.ref(cache)
    names = list(inspect.signature(model.forward).parameters)

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        mine = reference()
        if mine is None:
            return None
        # A forward of this model begins, so none is under way: one that is was interrupted.
        mine.abandon()
        given = dict(zip(names, args, strict=False)) | kwargs
        is_mine = given.get("past_key_values") is mine
        return ((), mine.begin(module, given)) if is_mine else None

    def after(
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: CausalLMOutputWithPast | None,
    ) -> CausalLMOutputWithPast | None:
        mine = reference()
        return None if mine is None else mine.end(output)

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        # Called after a forward that raised as well, without an output.
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    weakref.finalize(cache, _remove, handles)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
