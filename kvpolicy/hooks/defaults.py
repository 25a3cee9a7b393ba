"""What happens when no policy answers, written as hook implementations like any policy.

Asked last in every stack, after policies that want to be asked last themselves.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpolicy.markers import hookimpl

if TYPE_CHECKING:
    from kvpolicy.cache.rows import LayerRows
    from kvpolicy.engine.request import Waiting


class Defaults:
    """Arrival order, newest rows first, the best rows stay, the others are forgotten."""

    @hookimpl(trylast=True)
    def schedule(self, waiting: "Sequence[Waiting]", num_free: int) -> list[list[int]]:
        """Admit in order of arrival, as one group."""
        return [[request.id for request in waiting[:num_free]]]

    @hookimpl(trylast=True)
    def score(self, positions: Tensor) -> Tensor:
        """Rate newer rows higher."""
        num_rows = positions.shape[2]
        newer = torch.arange(num_rows, dtype=torch.float32, device=positions.device)
        return newer.expand(positions.shape)

    @hookimpl(trylast=True)
    def select(self, scores: Tensor, budget: int) -> Tensor:
        """Keep the best rows, the newer one of two equals."""
        return top_rows(scores, budget)

    @hookimpl(trylast=True)
    def evict(self, rows: "LayerRows", keep: Tensor) -> bool:
        """Forget the rows that leave."""
        rows.keep(keep)
        return True


def top_rows(scores: Tensor, budget: int) -> Tensor:
    """The rows with the highest scores, in order of position.

    Args:
        scores: ``[B, H_kv, T]``.
        budget: Rows that stay.

    Returns:
        ``[B, H_kv, min(budget, T)]``, int64, rising. Of equal scores the newer rows stay.
    """
    num_rows = scores.shape[2]
    # A stable sort of the reversed rows meets the newer of two equals first.
    order = scores.flip(2).sort(dim=2, descending=True, stable=True).indices
    return (num_rows - 1 - order[:, :, :budget]).sort(dim=2).values
