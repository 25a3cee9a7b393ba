"""Attention over the slabs: the attention function that the model calls in every layer.

Its queries are after RoPE. It records what policies read: the most recent queries, and what rows
accumulate of the attention that they receive.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvpolicy.attention.accumulators import accumulate, read_logits
from kvpolicy.attention.softmax import PLAIN, Softmax
from kvpolicy.cache.layout import LayerLayout, StepLayout
from kvpolicy.cache.probe_step import ProbeStep
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import ModelError
from kvpolicy.model.config import hiding_window
from kvpolicy.model.marking import HasMarking, mark_static_rows

# Where weights are computed, queries are taken in blocks whose weights take at most so many bytes,
# or one by one. Logits and a copy in the model's dtype come on top. On a CPU a block stays in its
# caches; on a GPU large blocks mean few launches.
BLOCK_BYTES = 8 << 20
BLOCK_BYTES_ON_GPU = 256 << 20


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
        step.remember_queries(layer, _as_policies_read(queries, scaling))
    if softmax.is_plain and not layer.accumulators:
        return _fused(queries, keys, values, layout.mask, scaling)
    accumulated = {
        name: keys.new_zeros(keys.shape[:3], dtype=torch.float32) for name in layer.accumulators
    }
    output = _weighted(step, layout, queries, keys, values, scaling, softmax, accumulated)
    for name, received in accumulated.items():
        if layout.kept is not None:
            index = layout.kept[:, None].expand(-1, received.shape[1], -1)
            received = received.gather(2, index)
        layout.add(layer.tracks[name], step.served, received)
    return output


def attend_aside(
    step: ProbeStep,
    layer_idx: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Attend from the tokens of a probe to the rows of their slots and to each other.

    Args:
        step: The probe; it has stored the new rows of this layer already.
        layer_idx: Decoder layer, counted from 0.
        queries: Queries after RoPE, ``[B, H_q, L, D]``.
        keys: What `ProbeStep.store` returned for this layer, ``[B, H_kv, N, D]``.
        values: Values of the same rows.
        scaling: Factor on the logits.
        softmax: The layer's softmax.

    Returns:
        Attention output, ``[B, H_q, L, D]``.
    """
    step.attended.add(layer_idx)
    step.remember_queries(layer_idx, _as_policies_read(queries, scaling))
    (held_keys, held_values), visible = step.held(layer_idx), step.visible(layer_idx)
    num_held, length = held_keys.shape[2], queries.shape[2]
    output = torch.empty_like(queries, dtype=values.dtype)
    if keys.dtype == torch.float16:
        queries, keys, held_keys = queries.float(), keys.float(), held_keys.float()
    num_bytes = BLOCK_BYTES if keys.device.type == "cpu" else BLOCK_BYTES_ON_GPU
    block = max(1, num_bytes // (4 * visible.shape[3] * queries.shape[:2].numel()))
    for start in range(0, length, block):
        now = slice(start, min(start + block, length))
        grouped = queries[:, :, now].unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        logits = [grouped @ own.transpose(2, 3) for own in (held_keys, keys)]
        scaled = torch.cat(logits, dim=3).float().mul_(scaling)
        scaled = scaled.unflatten(2, (-1, now.stop - start))  # [B, H_kv, G, L, T + N]
        weights = softmax.weights(scaled, visible[:, :, None, now]).flatten(2, 3).to(values.dtype)
        found = weights[..., :num_held] @ held_values + weights[..., num_held:] @ values
        output[:, :, now] = found.unflatten(2, (-1, now.stop - start)).flatten(1, 2)
    return output


def _as_policies_read(queries: Tensor, scaling: float) -> Tensor:
    """Queries into which any other scaling than ``D ** -0.5`` is folded."""
    factor = scaling * queries.shape[-1] ** 0.5
    return queries if abs(factor - 1) < 1e-6 else queries * factor


def _fused(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Attention with a plain softmax by torch's kernels, ``[B, H_q, L, D]``, without weights."""
    num_kv_heads = keys.shape[1]
    if queries.shape[2] == 1:
        # The heads of a group take the place of the length: the kernel then reads a key once
        # for all of them, and takes the mask as it is.
        grouped = queries.reshape(-1, num_kv_heads, queries.shape[1] // num_kv_heads, keys.shape[3])
        output = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=scaling
        )
        return output.reshape(queries.shape)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.repeat_interleave(queries.shape[1] // num_kv_heads, dim=1)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
    )


def _weighted(
    step: StepLayout,
    layout: LayerLayout,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softmax: Softmax,
    accumulated: dict[str, Tensor],
) -> Tensor:
    """Attention by softmax weights, ``[B, H_q, L, D]``, in blocks of queries.

    Updates accumulators by name, ``[B, H_kv, T]`` each, fp32, by what each row receives from the
    new tokens.
    """
    length, num_rows = queries.shape[2], keys.shape[2]
    if keys.dtype == torch.float16:
        # A product of large keys and queries may exceed what half precision can hold.
        queries, keys = queries.float(), keys.float()
    is_real = torch.from_numpy(step.is_real).to(keys.device) if step.has_pads else None
    output = torch.empty_like(queries, dtype=values.dtype)
    num_bytes = BLOCK_BYTES if keys.device.type == "cpu" else BLOCK_BYTES_ON_GPU
    block = max(1, num_bytes // (4 * num_rows * queries.shape[:2].numel()))
    for start in range(0, length, block):
        now = slice(start, min(start + block, length))
        # The newest token sees all rows, and each token before it one row less.
        seen = slice(num_rows - length + now.stop)
        mask = None if layout.mask is None else layout.mask[:, :, now, seen]
        logits = _masked_logits(queries[:, :, now], keys[:, :, seen], mask, scaling, softmax)
        weights = softmax.weights_of(logits, overwrite=not read_logits(accumulated))
        if is_real is not None:  # a pad gives no row anything, and nothing reads its output
            weights *= is_real[:, None, None, now, None]
        weights = weights.flatten(2, 3)  # [B, H_kv, G * L, T]
        if accumulated:
            tracks = {name: track[:, :, seen] for name, track in accumulated.items()}
            accumulate(tracks, weights, logits.flatten(2, 3))
        del logits
        grouped = weights.to(values.dtype) @ values[:, :, seen]
        output[:, :, now] = grouped.unflatten(2, (-1, now.stop - start)).flatten(1, 2)
        del weights  # before the logits of the next block are made
    return output


def _masked_logits(
    queries: Tensor, keys: Tensor, mask: Tensor | None, scaling: float, softmax: Softmax
) -> Tensor:
    """What a softmax reads, ``[B, H_kv, G, L, T]``, fp32, without repeating keys for the group.

    Args:
        queries: ``[B, H_q, L, D]``; query head h belongs to KV head ``h // G``.
        keys: ``[B, H_kv, T, D]``.
        mask: Rows each query may see, bool, broadcastable to ``[B, H_kv, L, T]``.
        scaling: Factor on the logits.
        softmax: The layer's softmax.
    """
    num_kv_heads, length = keys.shape[1], queries.shape[2]
    grouped = queries.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # [B, H_kv, G * L, D]
    logits = (grouped @ keys.transpose(2, 3)).float().mul_(scaling)
    logits = logits.unflatten(2, (-1, length))
    return softmax.masked(logits, None if mask is None else mask[:, :, None])


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kvpolicy_forward: HasMarking | None = None,
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
    if isinstance(step, StaticStep):
        output = step.attend(layer_idx, query, key, value, scaling, softcap, sinks)
        assert kvpolicy_forward is not None
        if kvpolicy_forward.marking is not None:
            mark_static_rows(kvpolicy_forward, layer_idx, key, value)
    else:
        softmax = PLAIN if softcap is None and sinks is None else Softmax(softcap, sinks)
        attending: Any = attend_aside if isinstance(step, ProbeStep) else attend
        output = attending(step, layer_idx, query, key, value, scaling, softmax)
    return output.transpose(1, 2).contiguous(), None
