"""Attention over the slabs: the function that Hugging Face models call in every layer.

It sees queries after RoPE, stores nothing of its own, and leaves behind what policies asked
for: the most recent queries, and the attention each row has received.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvpolicy.cache import ATTN_SUMS, LayerCache
from kvpolicy.errors import ModelError
from kvpolicy.step import Step


def attend(
    step: Step, layer_idx: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> Tensor:
    """Attend from the new tokens of a step to all rows of their slots.

    Args:
        step: The forward; it has stored the new rows of this layer already.
        layer_idx: Decoder layer, counted from 0.
        queries: Queries after RoPE, ``[B, H_q, L, D]``.
        keys: All rows of the served slots, ``[B, H_kv, T, D]``.
        values: The same of the values.
        scaling: Factor on the logits.

    Returns:
        Attention output, ``[B, H_q, L, D]``.
    """
    layer, layout = step.cache.layers[layer_idx], step.layout(layer_idx)
    step.attended.add(layer_idx)
    step.remember_queries(layer, queries)
    if ATTN_SUMS not in layer.tracks:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=layout.mask, scale=scaling, enable_gqa=True
        )
    weights = softmax_weights(queries, keys, layout.mask, scaling)
    _accumulate(layer, step, weights)
    grouped = weights.to(values.dtype).flatten(2, 3) @ values  # [B, H_kv, G * L, D]
    return grouped.view(queries.shape)


def softmax_weights(queries: Tensor, keys: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Softmax weights in fp32, ``[B, H_kv, G, L, T]``, without repeating keys for the group.

    Args:
        queries: ``[B, H_q, L, D]``; query head h belongs to KV head ``h // G``.
        keys: ``[B, H_kv, T, D]``.
        mask: Rows each query may see, bool, broadcastable to ``[B, H_kv, L, T]``.
        scaling: Factor on the logits.
    """
    num_kv_heads, length = keys.shape[1], queries.shape[2]
    grouped = queries.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # [B, H_kv, G * L, D]
    logits = (grouped @ keys.transpose(2, 3)).float() * scaling
    logits = logits.unflatten(2, (-1, length))
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None], torch.finfo(logits.dtype).min)
    return logits.softmax(dim=-1)


def _accumulate(layer: LayerCache, step: Step, weights: Tensor) -> None:
    """Add what each row received from the new queries; fp32, summed over the group."""
    if step.has_pads:
        is_real = torch.from_numpy(step.is_real).to(weights.device)
        weights = weights * is_real[:, None, None, :, None]
    received = weights.sum(dim=(2, 3))  # [B, H_kv, T]
    layer.tracks[ATTN_SUMS][step.first : step.last, :, : received.shape[2]] += received


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kvpolicy_step: Step | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Adapt `attend` to transformers' ``AttentionInterface``.

    Args:
        module: The attention module; knows its ``layer_idx``.
        query: ``[B, H_q, L, D]`` after RoPE.
        key: What the cache returned for this layer, ``[B, H_kv, T, D]``.
        value: The same of the values.
        attention_mask: Must be ``None``: the step knows which rows are real.
        scaling: Factor on the logits; default ``D ** -0.5``.
        kvpolicy_step: The forward under way.
        kwargs: What the model passes to every attention function.

    Returns:
        ``[B, L, H_q, D]`` and no weights.

    Raises:
        ModelError: If the model wants something else than plain softmax attention.
    """
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    reason = None
    if kvpolicy_step is None:
        reason = "it keeps the arguments of a forward from its attention"
    elif attention_mask is not None:
        reason = "it masks its attention in a way of its own"
    elif kwargs.get("softcap") is not None:
        reason = "it caps the logits of its attention; only plain softmax is computed"
    elif kwargs.get("s_aux") is not None:
        reason = "its attention has learned sinks; only plain softmax is computed"
    elif key.shape[1] != kvpolicy_step.cache.layers[layer_idx].shape.num_kv_heads:
        reason = f"it attends with {key.shape[1]} key heads, more than it stores"
    if kvpolicy_step is None or reason is not None:
        msg = f"a model with {type(module).__name__} cannot be run: {reason}"
        raise ModelError(msg)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = attend(kvpolicy_step, layer_idx, query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None
