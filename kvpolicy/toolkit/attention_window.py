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


def window_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    kernel_size: int,
    pooling: Pooling = "maxpool",
    present: Tensor | None = None,
) -> Tensor:
    """Importance of the rows before the window, as R-KV's code computes it, and of the window's.

    Rows before the window: the maximum of the logits over the query heads of a group, softmax
    over these rows, mean over the window, pooling over neighbouring rows (R-KV, eqs. 2-4;
    ``compute_attention_scores`` and ``update_kv`` at commit d15c976).

    The authors keep the window's rows and do not score them. Here such a row gets the mean of
    its weights in a softmax over all rows that the queries see, not pooled, so that whatever
    combines or adjusts scores knows what it is worth.

    Args:
        queries: Last ``W`` queries after RoPE, ``[B, H_q, W, D]``.
        keys: Keys after RoPE, ``[B, H_kv, T, D]``; the last ``W`` rows are the window's.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"``.
        present: Columns that a head has a row for, the last ones and all of the window, bool
            ``[B, H_kv, T]``; ``None``: all. The others get no weight.

    Returns:
        ``[B, H_kv, T]``, fp32.
    """
    window = queries.shape[2]
    num_before = keys.shape[2] - window
    before = _logits(queries, keys[:, :, :num_before]).amax(dim=2)  # [B, H_kv, W, T - W]
    if present is None:
        weights = before.softmax(dim=-1)
    else:
        absent = ~present[:, :, None, :num_before]
        before = before.masked_fill(absent, -torch.inf)
        # The softmax of a head that has no row before the window is NaN.
        weights = before.softmax(dim=-1).masked_fill(absent, 0)
    importance = pool(weights.mean(dim=2), kernel_size, pooling)
    within = _logits(queries, keys[:, :, num_before:]).amax(dim=2)  # [B, H_kv, W, W]
    later = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    within = within.masked_fill(later, -torch.inf)
    total = torch.logaddexp(before.logsumexp(-1, keepdim=True), within.logsumexp(-1, keepdim=True))
    return torch.cat([importance, (within - total).exp().mean(dim=2)], dim=2)


def ranked_window_scores(
    queries: Tensor,
    keys: Tensor,
    tracks: RankTracks,
    rank: str,
    *,
    kernel_size: int,
    pooling: Pooling,
    present: Tensor | None = None,
) -> Tensor:
    """SnapKV's scores while decoding, as R-KV's code computes them; see `window_scores`.

    Neighbours are pooled in the authors' order of rows, which `score_in_rank_order` restores.

    Args:
        queries: Last ``W`` queries after RoPE, ``[B, H_q, W, D]``.
        keys: Keys after RoPE, ``[B, H_kv, T, D]``; the last ``W`` rows are the window's.
        tracks: The policy's tracks.
        rank: Name of the policy's track of ranks.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"``.
        present: Columns that a head has a row for; see `window_scores`.

    Returns:
        ``[B, H_kv, T]``, fp32.
    """

    def score(keys: Tensor) -> Tensor:
        # Columns without a row come first in either order.
        return window_scores(
            queries, keys, kernel_size=kernel_size, pooling=pooling, present=present
        )

    return score_in_rank_order(score, keys, tracks, rank, queries.shape[2], present)


def pooled_window_attention(
    weights: Tensor,
    num_kv_heads: int,
    *,
    kernel_size: int,
    pooling: Pooling,
    group_reduce: GroupReduce,
    window: int | None = None,
) -> Tensor:
    """SnapKV's scores of a prompt, as published; the rows of the window are not pooled.

    Softmax weights are summed over the window, reduced over the query heads of a group
    (an addition of KVCache-Factory, c97f9d7, ``kv_head`` mode), and pooled over neighbouring
    rows (SnapKV, listing 1; ``SnapKVCluster.update_kv`` at commit e216ddc).

    Args:
        weights: Softmax weights of the window's queries, ``[B, H_q, W, T]``. See
            `kvpolicy.observed_weights`.
        num_kv_heads: KV heads, ``H_kv``.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"``.
        group_reduce: ``"mean"``, ``"max"`` or ``"sum"``.
        window: Newest rows that are the window's; ``None``: one of each query.

    Returns:
        ``[B, H_kv, T]``, fp32.
    """
    num_queries, num_rows = weights.shape[2:]
    window = num_queries if window is None else window
    grouped = weights.sum(dim=2).unflatten(1, (num_kv_heads, -1))  # [B, H_kv, G, T]
    reduce = {"mean": grouped.mean, "max": grouped.amax, "sum": grouped.sum}[group_reduce]
    before, within = reduce(dim=2).split([num_rows - window, window], dim=2)
    return torch.cat([pool(before, kernel_size, pooling), within], dim=2)


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
