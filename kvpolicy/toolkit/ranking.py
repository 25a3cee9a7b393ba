"""Rows in the order in which an earlier top-k left them.

R-KV's code gathers the rows that stay by descending score, then those of the window. At the next
compaction it pools neighbours, and looks for the newest similar row, in that order. Slabs here
are always sorted by position; a track of ranks lets a policy restore the authors' order.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class RankTracks(Protocol):
    """Tracks of a policy; `kvpolicy.Tracks` fits."""

    def __getitem__(self, name: str) -> Tensor:
        """Read a track, ``[B, H_kv, T]``."""

    def __setitem__(self, name: str, values: Tensor) -> None:
        """Write a track, ``[B, H_kv, T]``."""


def score_in_rank_order(
    score: Callable[[Tensor], Tensor],
    keys: Tensor,
    tracks: RankTracks,
    rank: str,
    window: int,
    present: Tensor | None = None,
) -> Tensor:
    """Score rows in the authors' order and store the ranks that the new scores give.

    Args:
        score: Maps keys in that order to scores, ``[B, H_kv, T]``.
        keys: Keys sorted by position, ``[B, H_kv, T, D]``.
        tracks: The policy's tracks.
        rank: Name of the policy's track of ranks.
        window: Rows of the window, the last ones.
        present: Columns that a head has a row for, the last ones, bool ``[B, H_kv, T]``;
            ``None``: all. The others come first in that order, too.

    Returns:
        The scores by row, ``[B, H_kv, T]``.
    """
    ranks = tracks[rank]
    if present is not None:
        ranks = ranks.masked_fill(~present, -torch.inf)
    order = rank_order(ranks)
    scores = score(take_rows(keys, order))
    tracks[rank] = by_row(ranks_by_score(scores, window), order)
    return by_row(scores, order)


def rank_order(ranks: Tensor) -> Tensor:
    """The order of rows by rank; new rows, with rank 0, come last.

    Args:
        ranks: Ranks from `ranks_by_score` at the last compaction, ``[B, H_kv, T]``.

    Returns:
        Row indices, ``[B, H_kv, T]``, int64.
    """
    return ranks.sort(dim=2, stable=True).indices


def take_rows(rows: Tensor, order: Tensor) -> Tensor:
    """Rows ``[B, H_kv, T, D]`` in the given order, ``[B, H_kv, K]``."""
    # Copies a row at a time, several times as fast as `gather`, which copies single numbers.
    first = torch.arange(0, rows.shape[:3].numel(), rows.shape[2], device=rows.device)
    index = order + first.view(*rows.shape[:2], 1)
    return rows.flatten(0, 2).index_select(0, index.flatten()).reshape(*order.shape, rows.shape[3])


def by_row(values: Tensor, order: Tensor) -> Tensor:
    """Undo `take_rows`: values ``[B, H_kv, T]`` in the given order, sorted by row again."""
    return torch.empty_like(values).scatter_(2, order, values)


def ranks_by_score(scores: Tensor, window: int) -> Tensor:
    """Ranks that sort rows by descending score, with the window's rows last, in their order.

    Args:
        scores: ``[B, H_kv, T]``; the last ``window`` rows are the window's.
        window: Rows of the window.

    Returns:
        ``[B, H_kv, T]``, all below 0, so that later rows, with rank 0, come last.
    """
    num_rows = scores.shape[2]
    candidates = scores[:, :, : num_rows - window]
    best_first = candidates.argsort(dim=2, descending=True, stable=True)
    place = torch.arange(num_rows, dtype=torch.float32, device=scores.device)
    ranks = place.expand(scores.shape).clone()
    ranks[:, :, : num_rows - window] = by_row(ranks[:, :, : num_rows - window], best_first)
    return ranks - num_rows
