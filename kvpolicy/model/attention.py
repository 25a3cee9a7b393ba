"""The attention function that the model calls in every layer: from a forward to a backend.

Its queries are after RoPE. How attention is computed is `kvpolicy.attention`; here is which rows
are attended to, and what is recorded of it for policies: the most recent queries, and what rows
accumulate of the attention that they receive.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.attention import eager
from kvpolicy.attention.base import window_factor
from kvpolicy.attention.softmax import PLAIN, Softmax
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import ModelError
from kvpolicy.model.annotating import annotate_static_rows
from kvpolicy.model.config import hiding_window
from kvpolicy.model.forward_input import ForwardInput


def attend(
    step: EagerStep,
    layer_idx: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Attend from the new tokens of a step to all rows of their slots.

    Args:
        step: The layout of the forward; it has stored the new rows of this layer already.
        layer_idx: Decoder layer, counted from 0.
        queries: Queries after RoPE, ``[B, H_q, L, D]``.
        keys: What `EagerStep.store` returned for this layer, ``[B, H_kv, T, D]``.
        values: Values of the same rows.
        scaling: Factor on the logits.
        softmax: The layer's softmax.

    Returns:
        Attention output, ``[B, H_q, L, D]``.
    """
    layer, opened = step.cache.layers[layer_idx], step.layers[layer_idx]
    step.attended.add(layer_idx)
    layer.softmax = softmax
    if opened.remembers:
        opened.remember(_as_policies_read(queries, scaling))
    if opened.held is not None:
        return eager.attend_beside(
            queries, opened.held, (keys, values), opened.visible, scaling=scaling, softmax=softmax
        )
    accumulated = {
        name: keys.new_zeros(keys.shape[:3], dtype=torch.float32) for name in layer.accumulators
    }
    output = eager.attend(
        queries,
        keys,
        values,
        opened.visible,
        scaling=scaling,
        softmax=softmax,
        accumulated=accumulated,
    )
    for name, received in accumulated.items():
        opened.receive(name, received)
    return output


def _as_policies_read(queries: Tensor, scaling: float) -> Tensor:
    """Queries into which any other scaling than ``D ** -0.5`` is folded."""
    factor = window_factor(scaling, queries.shape[-1])
    return queries if factor == 1 else queries * factor


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kvpolicy_forward: ForwardInput | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Adapt `attend` to transformers' ``AttentionInterface``.

    Args:
        module: The attention module, with its ``layer_idx``.
        query: ``[B, H_q, L, D]`` after RoPE.
        key: What the cache returned for this layer, ``[B, H_kv, T, D]``.
        value: Values of the same rows.
        attention_mask: Must be ``None``: the layout has the mask.
        scaling: Factor on the logits; default ``D ** -0.5``.
        kvpolicy_forward: The forward under way.
        kwargs: What the model passes to every attention function; ``softcap``, ``s_aux`` and
            ``sliding_window`` are used.

    Returns:
        ``[B, L, H_q, D]`` and no weights.

    Raises:
        ModelError: If the model needs attention that is not computed here.
    """
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    if kvpolicy_forward is not None and (layer_idx is None or layer_idx < 0):
        # Layers that share a module pass their number to the cache only.
        layer_idx = kvpolicy_forward.newest_layer
    reason = None
    if kvpolicy_forward is None:
        reason = "it does not pass the arguments of a forward to its attention"
    elif attention_mask is not None:
        reason = "it masks its attention in its own way"
    else:
        step = kvpolicy_forward.step
        shape = step.cache.layers[layer_idx].shape
        window = kwargs.get("sliding_window")
        if window is not None:
            window = hiding_window(window, getattr(module, "config", None))
        if key.shape[1] != shape.num_kv_heads:
            reason = f"it attends with {key.shape[1]} key heads, more than it stores"
        elif window != shape.sliding_window:
            reason = (
                f"its layer {layer_idx} attends to a window of {window}, "
                f"its configuration says {shape.sliding_window}"
            )
    if reason is not None:
        msg = f"a model with {type(module).__name__} cannot be run: {reason}"
        raise ModelError(msg)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if isinstance(step, StaticStep):
        output = step.attend(layer_idx, query, key, value, scaling, softcap, sinks)
        assert kvpolicy_forward is not None
        if kvpolicy_forward.annotating is not None:
            annotate_static_rows(kvpolicy_forward, layer_idx, key, value)
    else:
        softmax = PLAIN if softcap is None and sinks is None else Softmax(softcap, sinks)
        output = attend(step, layer_idx, query, key, value, scaling, softmax)
    return output.transpose(1, 2).contiguous(), None
