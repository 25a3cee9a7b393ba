"""Policies with which the KV heads of a layer share its budget, and one of them in plain loops."""

import math
from collections.abc import Callable
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False)
class FlatTop:
    """Ranks the rows of all heads together, as Ada-KV does, above a floor for each head.

    Attributes:
        alpha: Share of the budget that each head has for its own best rows.
    """

    alpha: float = 0.2
    ragged: ClassVar[bool] = True

    @hookimpl
    def select(self, scores: Tensor, positions: Tensor, budget: int, heads: str) -> Tensor | None:
        """The best rows of each head up to its floor, then the best of all heads."""
        if heads == "own":
            return None
        num_heads = scores.shape[1]
        floor = max(1, int(self.alpha * budget))
        # Ranks in each head, 0 for the best; of equal scores the newer row is better.
        order = scores.flip(2).argsort(dim=2, descending=True, stable=True)
        rank = order.argsort(dim=2).flip(2)
        raised = scores.masked_fill(rank < floor, math.inf)
        present = positions >= 0
        raised = raised.masked_fill(~present, -math.inf)
        best = raised.flatten(1).argsort(dim=1, descending=True, stable=True)
        best = best[:, : budget * num_heads]
        mask = torch.zeros_like(raised.flatten(1), dtype=torch.bool).scatter_(1, best, True)
        return mask.view(scores.shape) & present


@attrs.define(eq=False)
class RatedFlatTop(FlatTop):
    """Rates rows by their head and position only, so that an oracle needs no keys."""

    rate: Callable[[int, int], float] = attrs.field(default=lambda head, position: 0.0)

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        """The rating of each row; of rows that there are none, anything."""
        rated = [
            [[self.rate(head, position) for position in rows] for head, rows in enumerate(one)]
            for one in positions.tolist()
        ]
        return torch.tensor(rated, dtype=torch.float32, device=positions.device)


@attrs.define(eq=False)
class LongKeysAlike:
    """Rates rows by the length of their keys, whatever number of rows a head holds."""

    ragged: ClassVar[bool] = True

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        """The Euclidean length of each key."""
        return keys.float().norm(dim=-1)


def rating(seed: int) -> Callable[[int, int], float]:
    """Distinct ratings without a pattern; the first heads have the higher ones."""

    def rate(head: int, position: int) -> float:
        mixed = (position * 2654435761 + head * 40503 + seed * 97) % 100_003
        return mixed / 100_003 - 0.3 * head

    return rate


def flat_top_loop(rated: list[list[float]], budget: int, alpha: float) -> list[list[int]]:
    """What `FlatTop` keeps of one sequence, in plain loops: indices of rows for each head."""
    floor = max(1, int(alpha * budget))
    kept: list[set[int]] = []
    rest = []
    for head, scores in enumerate(rated):
        ranked = sorted(range(len(scores)), key=lambda row: (-scores[row], -row))
        kept.append(set(ranked[:floor]))
        rest += [(-scores[row], head, row) for row in ranked[floor:]]
    num_left = budget * len(rated) - sum(map(len, kept))
    for _, head, row in sorted(rest)[: max(num_left, 0)]:
        kept[head].add(row)
    return [sorted(rows) for rows in kept]
