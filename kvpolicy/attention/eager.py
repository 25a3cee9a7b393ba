"""Attention in an eager forward, from many queries, in torch on every device.

By torch's fused kernels, or by softmax weights where rows accumulate them or the softmax is not
plain: in blocks of queries, so that no tensor of all weights is made.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.attention.accumulators import accumulate, read_logits
from kvpolicy.attention.softmax import Softmax

# Where weights are computed, queries are taken in blocks whose weights take at most so many bytes,
# or one by one. Logits and a copy in the model's dtype come on top. On a CPU a block stays in its
# caches; on a GPU large blocks mean few launches.
BLOCK_BYTES = 8 << 20
BLOCK_BYTES_ON_GPU = 256 << 20


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softmax: Softmax,
    accumulated: Mapping[str, Tensor],
    is_real: Tensor | None = None,
) -> Tensor:
    """Attend from new tokens to rows, of which those of the new tokens are the last.

    Args:
        queries: Queries after RoPE, ``[B, H_q, L, D]``; query head h belongs to KV head ``h // G``.
        keys: ``[B, H_kv, T, D]``.
        values: ``[B, H_kv, T, D]``.
        mask: Rows each query may see, bool ``[B, 1 or H_kv, L, T]``; ``None``: all.
        scaling: Factor on the logits.
        softmax: The layer's softmax.
        accumulated: Accumulators by name, ``[B, H_kv, T]`` each, fp32; changed in place.
        is_real: Tokens that are no pads, bool ``[B, L]``; ``None``: all.

    Returns:
        ``[B, H_q, L, D]``.
    """
    if softmax.is_plain and not accumulated:
        return _fused(queries, keys, values, mask, scaling)
    return _weighted(queries, keys, values, mask, scaling, softmax, accumulated, is_real)


def _fused(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Attention with a plain softmax, of which outputs are all that is wanted."""
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
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softmax: Softmax,
    accumulated: Mapping[str, Tensor],
    is_real: Tensor | None,
) -> Tensor:
    """Attention by softmax weights."""
    length, num_rows = queries.shape[2], keys.shape[2]
    if keys.dtype == torch.float16:
        # A product of large keys and queries may exceed what half precision can hold.
        queries, keys = queries.float(), keys.float()
    output = torch.empty_like(queries, dtype=values.dtype)
    for now in _blocks(queries, num_rows):
        # The newest token sees all rows, and each token before it one row less.
        seen = slice(num_rows - length + now.stop)
        of_block = None if mask is None else mask[:, :, now, seen]
        logits = _masked_logits(queries[:, :, now], keys[:, :, seen], of_block, scaling, softmax)
        weights = softmax.weights_of(logits, overwrite=not read_logits(accumulated))
        if is_real is not None:  # a pad gives no row anything, and nothing reads its output
            weights *= is_real[:, None, None, now, None]
        weights = weights.flatten(2, 3)  # [B, H_kv, G * L, T]
        if accumulated:
            tracks = {name: track[:, :, seen] for name, track in accumulated.items()}
            accumulate(tracks, weights, logits.flatten(2, 3))
        del logits
        grouped = weights.to(values.dtype) @ values[:, :, seen]
        output[:, :, now] = grouped.unflatten(2, (-1, now.stop - now.start)).flatten(1, 2)
        del weights  # before the logits of the next block are made
    return output


def attend_beside(
    queries: Tensor,
    held: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    visible: Tensor,
    *,
    scaling: float,
    softmax: Softmax,
) -> Tensor:
    """Attend from tokens to rows of the cache and to their own rows, which are beside it.

    Neither is copied.

    Args:
        queries: Queries after RoPE, ``[B, H_q, L, D]``.
        held: Keys and values of the cache, ``[B, H_kv, T, D]`` each.
        own: Those of the tokens, ``[B, H_kv, N, D]`` each.
        visible: What each query sees of the first, then of the others, bool
            ``[B, 1 or H_kv, L, T + N]``.
        scaling: Factor on the logits.
        softmax: The layer's softmax.

    Returns:
        ``[B, H_q, L, D]``.
    """
    (held_keys, held_values), (keys, values) = held, own
    num_held = held_keys.shape[2]
    output = torch.empty_like(queries, dtype=values.dtype)
    if keys.dtype == torch.float16:
        queries, keys, held_keys = queries.float(), keys.float(), held_keys.float()
    for now in _blocks(queries, visible.shape[3]):
        grouped = queries[:, :, now].unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        logits = [grouped @ some.transpose(2, 3) for some in (held_keys, keys)]
        scaled = torch.cat(logits, dim=3).float().mul_(scaling)
        scaled = scaled.unflatten(2, (-1, now.stop - now.start))  # [B, H_kv, G, L, T + N]
        weights = softmax.weights(scaled, visible[:, :, None, now]).flatten(2, 3).to(values.dtype)
        found = weights[..., :num_held] @ held_values + weights[..., num_held:] @ values
        output[:, :, now] = found.unflatten(2, (-1, now.stop - now.start)).flatten(1, 2)
    return output


def _blocks(queries: Tensor, num_rows: int) -> Iterator[slice]:
    """Blocks of queries ``[B, H_q, L, D]`` whose weights for all rows are made at once."""
    num_bytes = BLOCK_BYTES if queries.device.type == "cpu" else BLOCK_BYTES_ON_GPU
    block = max(1, num_bytes // (4 * num_rows * queries.shape[:2].numel()))
    length = queries.shape[2]
    for start in range(0, length, block):
        yield slice(start, min(start + block, length))


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
