"""Attention in an eager forward, from many queries.

By torch's fused kernels, or by softmax weights where rows accumulate them or the softmax is not
plain: on a GPU in kernels where it has them (`kvpolicy.attention.by_weights`), which take sliding
windows, too, so that these need no masks; else in torch's operations, in blocks of queries, so that
no tensor of all weights is made. A block's weights take at most
`kvpolicy.attention.blocks.BLOCK_BYTES`; logits and a copy in the model's dtype come on top.
"""

from collections.abc import Mapping, MutableSet

import torch
from torch import Tensor

from kvpolicy.attention.accumulators import accumulate, read_logits
from kvpolicy.attention.blocks import blocks
from kvpolicy.attention.by_weights import LEAST_QUERIES, attend_by_weights, on_gpu, why_not
from kvpolicy.attention.fused import attend_fused, output_for
from kvpolicy.attention.softmax import Softmax
from kvpolicy.attention.visible import Visible


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Visible,
    *,
    scaling: float,
    softmax: Softmax,
    accumulated: Mapping[str, Tensor],
    problems: MutableSet[str] | None = None,
) -> Tensor:
    """Attend from new tokens to rows, of which those of the new tokens are the last.

    Args:
        queries: Queries after RoPE, ``[B, H_q, L, D]``; query head h belongs to KV head ``h // G``.
        keys: ``[B, H_kv, T, D]``.
        values: ``[B, H_kv, T, V]``, of the same size or another one.
        visible: Which rows each query sees.
        scaling: Factor on the logits.
        softmax: The layer's softmax.
        accumulated: Accumulators by name, ``[B, H_kv, T]`` each, fp32; changed in place.
        problems: Takes up why a GPU does not do this in kernels, if it does not.

    Returns:
        ``[B, H_q, L, V]``; for pads finite, and of no meaning.
    """
    by_weights = bool(accumulated) or not softmax.is_plain
    # Torch's fused kernels need a mask of all rows for a window.
    is_for_kernels = by_weights or visible.reach is not None
    if is_for_kernels and on_gpu(keys.device) and queries.shape[2] >= LEAST_QUERIES:
        if (problem := why_not(queries, keys, values, visible)) is None:
            return attend_by_weights(
                queries,
                keys,
                values,
                visible,
                scaling=scaling,
                softmax=softmax,
                accumulated=accumulated,
            )
        if by_weights and problems is not None:
            problems.add(problem)
    parts = visible.parts
    output = torch.empty(0) if len(parts) == 1 else output_for(queries, values).zero_()
    for part in parts:
        of_queries = (part.entries, slice(None), part.columns)
        of_rows = (part.entries, slice(None), part.rows)
        given = queries[of_queries], keys[of_rows], values[of_rows], part.visible, scaling
        if by_weights:
            tracks = {name: track[of_rows] for name, track in accumulated.items()}
            found = _weighted(*given, softmax, tracks)
        else:
            found = attend_fused(*given)
        if len(parts) == 1:
            return found
        output[of_queries] = found
    return output


def _weighted(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Visible,
    scaling: float,
    softmax: Softmax,
    accumulated: Mapping[str, Tensor],
) -> Tensor:
    """Attention by softmax weights."""
    num_heads, num_kv_heads, num_rows = queries.shape[1], keys.shape[1], keys.shape[2]
    if keys.dtype == torch.float16:
        # A product of large keys and queries may exceed what half precision can hold.
        queries, keys = queries.float(), keys.float()
    output = output_for(queries, values)
    per_query = len(queries) * num_heads * num_rows
    for now in blocks(queries.shape[2], per_query, queries.device):
        seen = visible.rows(now)
        grouped = queries[:, :, now].unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
        logits = (grouped @ keys[:, :, seen].transpose(2, 3)).float().mul_(scaling)
        # [B, H_kv, G, L, T], without repeating keys for the group
        logits = softmax.masked(logits.unflatten(2, (-1, now.stop - now.start)), None)
        partly = slice(max(visible.seen_by_all(now), seen.start), seen.stop)
        if (mask := visible.mask(now, partly)) is not None:
            logits[..., partly.start - seen.start :].masked_fill_(~mask[:, :, None], float("-inf"))
        weights = softmax.weights_of(logits, overwrite=not read_logits(accumulated))
        if visible.has_pads:  # a pad gives no row anything, and nothing reads its output
            weights *= visible.real(now)[:, None, None, :, None]
        weights = weights.flatten(2, 3)  # [B, H_kv, G * L, T]
        if accumulated:
            tracks = {name: track[:, :, seen] for name, track in accumulated.items()}
            accumulate(tracks, weights, logits.flatten(2, 3))
        del logits
        found = weights.to(values.dtype) @ values[:, :, seen]
        output[:, :, now] = found.unflatten(2, (-1, now.stop - now.start)).flatten(1, 2)
        del weights  # before the logits of the next block are made
    return output


def attend_beside(
    queries: Tensor,
    held: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    visible: Visible,
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
        visible: What each query sees of the first, then of the others.
        scaling: Factor on the logits.
        softmax: The layer's softmax.

    Returns:
        ``[B, H_q, L, D]``.
    """
    (held_keys, held_values), (keys, values) = held, own
    num_held, num_rows = held_keys.shape[2], held_keys.shape[2] + keys.shape[2]
    output = output_for(queries, values)
    if keys.dtype == torch.float16:
        queries, keys, held_keys = queries.float(), keys.float(), held_keys.float()
    per_query = queries.shape[:2].numel() * num_rows
    for now in blocks(queries.shape[2], per_query, queries.device):
        grouped = queries[:, :, now].unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        logits = [grouped @ some.transpose(2, 3) for some in (held_keys, keys)]
        scaled = torch.cat(logits, dim=3).float().mul_(scaling)
        scaled = scaled.unflatten(2, (-1, now.stop - now.start))  # [B, H_kv, G, L, T + N]
        mask = visible.mask(now, slice(0, num_rows))
        weights = softmax.weights(scaled, None if mask is None else mask[:, :, None])
        weights = weights.flatten(2, 3).to(values.dtype)
        found = weights[..., :num_held] @ held_values + weights[..., num_held:] @ values
        output[:, :, now] = found.unflatten(2, (-1, now.stop - now.start)).flatten(1, 2)
    return output
