"""Rows in the order in which an earlier top-k left them.

The authors of R-KV gather the rows that stay by descending score, then the window's. Their
next compaction pools neighbours, and looks for the newest similar row, in that order. Our
slabs are always in order of position; a track of ranks, which travels with the rows, lets a
policy see them in its authors' order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvpolicy.cache.rows import Tracks


def score_in_rank_order(
    score: Callable[[Tensor], Tensor], keys: Tensor, tracks: Tracks, rank: str, window: int
) -> Tensor:
    """Score rows as their authors' cache holds them, and remember the order this leaves.

    Args:
        score: From keys in that order to their scores, ``[B, H_kv, T]``.
        keys: Keys in order of position, ``[B, H_kv, T, D]``.
        tracks: Where the ranks are kept.
        rank: Name of the policy's track of ranks.
        window: Rows of the window, the last ones.

    Returns:
        The scores by row, ``[B, H_kv, T]``.
    """
    order = kept_order(tracks[rank])
    scores = score(take_rows(keys, order))
    tracks[rank] = by_row(ranks_by_score(scores, window), order)
    return by_row(scores, order)


def kept_order(ranks: Tensor) -> Tensor:
    """The order of rows by rank; rows that joined since, with rank 0, come last.

    Args:
        ranks: What `ranks_by_score` returned at the last compaction, ``[B, H_kv, T]``.

    Returns:
        Row indices, ``[B, H_kv, T]``, int64.
    """
    return ranks.sort(dim=2, stable=True).indices


def take_rows(rows: Tensor, order: Tensor) -> Tensor:
    """Rows ``[B, H_kv, T, D]`` in the given order, ``[B, H_kv, T]``."""
    return rows.gather(2, order[..., None].expand(-1, -1, -1, rows.shape[3]))


def by_row(values: Tensor, order: Tensor) -> Tensor:
    """Undo `take_rows`: values ``[B, H_kv, T]`` in the given order, back by row."""
    return torch.empty_like(values).scatter_(2, order, values)


def ranks_by_score(scores: Tensor, window: int) -> Tensor:
    """Ranks that put rows by descending score, then the window's rows as they are.

    Args:
        scores: ``[B, H_kv, T]``; the last ``window`` rows are the window's.
        window: Rows of the window.

    Returns:
        ``[B, H_kv, T]``, all below 0, so that rows which join later come last.
    """
    num_rows = scores.shape[2]
    candidates = scores[:, :, : num_rows - window]
    best_first = candidates.argsort(dim=2, descending=True, stable=True)
    place = torch.arange(num_rows, dtype=torch.float32, device=scores.device)
    ranks = place.expand(scores.shape).clone()
    ranks[:, :, : num_rows - window] = by_row(ranks[:, :, : num_rows - window], best_first)
    return ranks - num_rows
