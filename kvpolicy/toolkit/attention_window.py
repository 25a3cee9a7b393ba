"""Scores from the observation window: attention of the most recent queries to every row.

Introduced by SnapKV; R-KV, PyramidKV and SkipKV build on it.
"""

from typing import Literal

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.toolkit.ranking import RankTracks, score_in_rank_order

Pooling = Literal["maxpool", "avgpool"]
GroupReduce = Literal["mean", "max", "sum"]


def odd(instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    """Validate a ``kernel_size``: an even kernel has no middle row."""
    if value % 2 == 0:
        msg = f"'{attribute.name}' must be odd: {value}"
        raise ValueError(msg)


def window_importance(
    queries: Tensor, keys: Tensor, *, kernel_size: int, pooling: Pooling = "maxpool"
) -> Tensor:
    """Importance of the rows before the window, as R-KV's code computes it.

    The maximum of the logits over the query heads of a group, softmax over the rows before the
    window, mean over the window, pooling over neighbouring rows (R-KV, eqs. 2-4;
    ``compute_attention_scores`` and ``update_kv`` at commit d15c976).

    Args:
        queries: Last ``W`` queries after RoPE, ``[B, H_q, W, D]``.
        keys: Keys after RoPE, ``[B, H_kv, T, D]``; the last ``W`` rows are the window's.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"``.

    Returns:
        ``[B, H_kv, T - W]``, fp32.
    """
    num_candidates = keys.shape[2] - queries.shape[2]
    logits = _logits(queries, keys[:, :, :num_candidates]).amax(dim=2)
    importance = logits.softmax(dim=-1).mean(dim=2)
    return pool(importance, kernel_size, pooling)


def snapkv_scores(
    queries: Tensor,
    keys: Tensor,
    tracks: RankTracks,
    rank: str,
    *,
    kernel_size: int,
    pooling: Pooling,
) -> Tensor:
    """SnapKV's scores while decoding, as R-KV's code computes them: the window is pinned.

    Neighbours are pooled in the authors' order of rows, which `score_in_rank_order` restores.

    Args:
        queries: Last ``W`` queries after RoPE, ``[B, H_q, W, D]``.
        keys: Keys after RoPE, ``[B, H_kv, T, D]``; the last ``W`` rows are the window's.
        tracks: The policy's tracks.
        rank: Name of the policy's track of ranks.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"``.

    Returns:
        ``[B, H_kv, T]``, fp32, ``inf`` for the rows of the window.
    """
    window = queries.shape[2]

    def score(keys: Tensor) -> Tensor:
        importance = window_importance(queries, keys, kernel_size=kernel_size, pooling=pooling)
        return pin_window(importance, window)

    return score_in_rank_order(score, keys, tracks, rank, window)


def snapkv_prompt_scores(
    weights: Tensor,
    num_kv_heads: int,
    *,
    kernel_size: int,
    pooling: Pooling,
    group_reduce: GroupReduce,
) -> Tensor:
    """SnapKV's scores of a prompt, as published: the window is pinned.

    Softmax weights are summed over the window, reduced over the query heads of a group
    (an addition of KVCache-Factory, c97f9d7, ``kv_head`` mode), and pooled over neighbouring
    rows (SnapKV, listing 1; ``SnapKVCluster.update_kv`` at commit e216ddc).

    Args:
        weights: Softmax weights of the window's queries, ``[B, H_q, W, T]``; the last ``W``
            rows are the window's. See `kvpolicy.observed_weights`.
        num_kv_heads: KV heads, ``H_kv``.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"``.
        group_reduce: ``"mean"``, ``"max"`` or ``"sum"``.

    Returns:
        ``[B, H_kv, T]``, fp32, ``inf`` for the rows of the window.
    """
    window, num_rows = weights.shape[2:]
    received = weights.sum(dim=2)[:, :, : num_rows - window]  # [B, H_q, T - W]
    grouped = received.unflatten(1, (num_kv_heads, -1))
    reduce = {"mean": grouped.mean, "max": grouped.amax, "sum": grouped.sum}[group_reduce]
    return pin_window(pool(reduce(dim=2), kernel_size, pooling), window)


def pin_window(importance: Tensor, window: int) -> Tensor:
    """Scores of all rows, ``[B, H_kv, T]``: the rows of the window are pinned."""
    return F.pad(importance, (0, window), value=torch.inf)


def pool(scores: Tensor, kernel_size: int, pooling: Pooling) -> Tensor:
    """Pool scores over neighbouring rows, keeping their number.

    Args:
        scores: ``[B, H, T]``.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"``, or ``"avgpool"``, which pads with zeros and so lowers the first
            and last rows, as in SnapKV's code.
    """
    if scores.shape[2] == 0:
        return scores
    reduce = F.max_pool1d if pooling == "maxpool" else F.avg_pool1d
    return reduce(scores, kernel_size, stride=1, padding=kernel_size // 2)


def _logits(queries: Tensor, keys: Tensor) -> Tensor:
    """Scaled dot products in fp32, ``[B, H_kv, G, W, T]``."""
    num_kv_heads, window = keys.shape[1], queries.shape[2]
    grouped = queries.float().unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    logits = grouped @ keys.float().transpose(2, 3)  # [B, H_kv, G * W, T]
    return logits.mul_(keys.shape[-1] ** -0.5).unflatten(2, (-1, window))
