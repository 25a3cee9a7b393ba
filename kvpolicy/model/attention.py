"""Attention over the slabs: the attention function that the model calls in every layer.

Its queries are after RoPE. It records what policies read: the most recent queries, and the
attention that each row has received.
"""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvpolicy.cache.layout import LayerLayout, StepLayout
from kvpolicy.cache.slab import ATTN_SUMS, LayerCache
from kvpolicy.cache.softmax import PLAIN, Softmax
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import ModelError
from kvpolicy.model.config import hiding_window


def attend(
    step: StepLayout,
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
        keys: What `StepLayout.store` returned for this layer, ``[B, H_kv, T, D]``.
        values: Values of the same rows.
        scaling: Factor on the logits.
        softmax: The layer's softmax.

    Returns:
        Attention output, ``[B, H_q, L, D]``.
    """
    layer, layout = step.cache.layers[layer_idx], step.layers[layer_idx]
    step.attended.add(layer_idx)
    layer.softmax = softmax
    if layer.window is not None:
        # Any other scaling is folded into the queries that policies read.
        factor = scaling * queries.shape[-1] ** 0.5
        step.remember_queries(layer, queries if abs(factor - 1) < 1e-6 else queries * factor)
    if softmax.is_plain and ATTN_SUMS not in layer.tracks:
        return _fused(queries, keys, values, layout.mask, scaling)
    weights = softmax_weights(queries, keys, layout.mask, scaling, softmax)
    if ATTN_SUMS in layer.tracks:
        _accumulate(layer, step, layout, weights)
    grouped = weights.to(values.dtype).flatten(2, 3) @ values  # [B, H_kv, G * L, D]
    return grouped.view(queries.shape)


def _fused(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Attention with a plain softmax by torch's kernels, ``[B, H_q, L, D]``, without weights."""
    num_kv_heads = keys.shape[1]
    if queries.shape[2] == 1:
        # The heads of a group take the place of the length: the kernel then reads a key once
        # for all of them, and takes the mask as it is.
        grouped = queries.view(-1, num_kv_heads, queries.shape[1] // num_kv_heads, keys.shape[3])
        output = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=scaling
        )
        return output.view(queries.shape)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.repeat_interleave(queries.shape[1] // num_kv_heads, dim=1)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
    )


def softmax_weights(
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    scaling: float,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Softmax weights in fp32, ``[B, H_kv, G, L, T]``, without repeating keys for the group.

    Args:
        queries: ``[B, H_q, L, D]``; query head h belongs to KV head ``h // G``.
        keys: ``[B, H_kv, T, D]``.
        mask: Rows each query may see, bool, broadcastable to ``[B, H_kv, L, T]``.
        scaling: Factor on the logits.
        softmax: The layer's softmax.
    """
    num_kv_heads, length = keys.shape[1], queries.shape[2]
    grouped = queries.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # [B, H_kv, G * L, D]
    if keys.dtype == torch.float16:
        # A product of large keys and queries may exceed what half precision can hold.
        grouped, keys = grouped.float(), keys.float()
    logits = (grouped @ keys.transpose(2, 3)).float() * scaling
    logits = logits.unflatten(2, (-1, length))
    return softmax.weights(logits, None if mask is None else mask[:, :, None])


def _accumulate(layer: LayerCache, step: StepLayout, layout: LayerLayout, weights: Tensor) -> None:
    """Add the attention each row received from the new queries; fp32, summed over the group."""
    if step.has_pads:
        is_real = torch.from_numpy(step.is_real).to(weights.device)
        weights = weights * is_real[:, None, None, :, None]
    received = weights.sum(dim=(2, 3))  # [B, H_kv, T]
    if layout.kept is not None:
        index = layout.kept[:, None].expand(-1, received.shape[1], -1)
        received = received.gather(2, index)
    layer.tracks[ATTN_SUMS][step.served, :, : received.shape[2]] += received


class HasStep(Protocol):
    """The forward under way, as `ModelAdapter.forward` passes it through the model."""

    step: StepLayout | StaticStep


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kvpolicy_forward: HasStep | None = None,
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
    softmax = PLAIN if softcap is None and sinks is None else Softmax(softcap, sinks)
    attend_ = step.attend if isinstance(step, StaticStep) else partial(attend, step)
    output = attend_(layer_idx, query, key, value, scaling, softmax)
    return output.transpose(1, 2).contiguous(), None
