"""Default hook implementations: the answers when no policy of a stack answers.

They are registered in every stack and called last.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.cache.rows import LayerRows
from kvpolicy.markers import hookimpl
from kvpolicy.state import WaitingRequest


class Defaults:
    """Admit in order of arrival; keep the newest rows; forget the others."""

    @hookimpl(trylast=True)
    def schedule(self, waiting: Sequence[WaitingRequest], num_free: int) -> list[list[int]]:
        """Admit in order of arrival, as one group."""
        return [[request.id for request in waiting[:num_free]]]

    @hookimpl(trylast=True)
    def score(self, positions: Tensor) -> Tensor:
        """Score newer rows higher."""
        num_rows = positions.shape[2]
        newer = torch.arange(num_rows, dtype=torch.float32, device=positions.device)
        return newer.expand(positions.shape)

    @hookimpl(trylast=True)
    def select(self, scores: Tensor, positions: Tensor, budget: int, heads: str) -> Tensor:
        """Keep the rows of each head with the highest scores."""
        kept = top_rows(scores, budget)
        if heads == "own":
            return kept
        # A head may have fewer rows than the budget.
        mask = torch.zeros_like(positions, dtype=torch.bool).scatter_(2, kept, True)
        return mask & (positions >= 0)

    @hookimpl(trylast=True)
    def evict(self, rows: LayerRows, keep: Tensor) -> bool:
        """Compact the slab in place."""
        rows.keep(keep)
        return True


def top_rows(scores: Tensor, budget: int) -> Tensor:
    """The rows with the highest scores, sorted by position.

    Args:
        scores: ``[B, H_kv, T]``.
        budget: Rows that stay.

    Returns:
        ``[B, H_kv, min(budget, T)]``, int64, rising. Of equal scores the newer rows stay.
    """
    num_rows = scores.shape[2]
    rows = torch.arange(num_rows, device=scores.device).expand(scores.shape)
    if budget >= num_rows:
        return rows.contiguous()
    # Selecting the least score that stays takes less time than sorting: several times on a CPU.
    least = scores.topk(budget, dim=2, sorted=False).values.amin(dim=2, keepdim=True)
    enough, equal = scores >= least, scores == least
    older = enough.sum(dim=2, keepdim=True) - budget  # of the equal ones, those that go
    stays = enough ^ (equal & (equal.cumsum(dim=2) <= older))
    # The n-th row that stays is written to place n, counted from 1, and those that go to place 0.
    places = stays.cumsum(dim=2) * stays
    kept = rows.new_zeros(*scores.shape[:2], budget + 1)
    return kept.scatter_(2, places, rows)[:, :, 1:].contiguous()
