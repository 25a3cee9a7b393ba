"""One budget for several heads: which rows stay if they compete with each other."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Counting = Literal["exact", "code"]


def rows_over_heads(
    scores: Tensor, present: Tensor, *, rows: int, floor: int = 0, least: float = -torch.inf
) -> Tensor:
    """The rows of all heads with the highest scores, of equal scores the newer ones.

    Args:
        scores: ``[B, H, T]``, newer rows last.
        present: Columns that a head has a row for, bool ``[B, H, T]``.
        rows: Rows that stay of all heads together, if there are as many.
        floor: Rows of each head, its best ones, that stay whatever other heads score; part of
            ``rows``.
        least: Rows with lower scores leave, unless they are part of the floor.

    Returns:
        Mask of rows that stay, bool ``[B, H, T]``.
    """
    order = _newest_first_of_equals(scores.where(present, -torch.inf), present)
    reserved = order.argsort(dim=-1, descending=True)[..., :floor]
    granted = torch.zeros_like(present).scatter(-1, reserved, True) & present
    wanted = present & ((scores >= least) | granted)
    # Rows of the floor come before all others, and rows that leave after them.
    rank = order + order.shape[1:].numel() * (granted.long() - (~wanted).long())
    chosen = rank.flatten(1).topk(min(rows, rank[0].numel()), dim=1).indices
    mask = torch.zeros_like(present).flatten(1).scatter(1, chosen, True).reshape(present.shape)
    return mask & wanted


def rows_over_model(
    scores: Sequence[Sequence[Tensor]],
    *,
    memory: int,
    floor_ratio: float = 0.0,
    threshold: float | None = None,
    counting: Counting = "exact",
) -> list[list[Tensor]]:
    """The rows that stay of one sequence if all heads of all layers share one budget.

    The authors' cache with a dynamic budget, which no plan can express: an engine that compacts
    layer by layer never sees the scores of all layers together.

    Args:
        scores: For each layer and KV head, ``log beta`` times age of its rows, oldest first.
        memory: Rows that stay of a head, in the mean, ``M``.
        floor_ratio: Share of the budget that is divided equally: each head keeps ``int(M f)`` rows
            besides those among the ``int(M L H_kv (1 - f))`` best of the model.
        threshold: If given, rows stay whose retention ``beta^age`` is no less, however many.
        counting: How rows of a head are counted under a floor. In the authors' code the first row
            of each head counts for the head before it (``"code"``).

    Returns:
        For each layer and head a mask of its rows.
    """
    heads = [head for layer in scores for head in layer]
    every = torch.cat(heads)
    if threshold is not None:
        chosen = every >= torch.tensor(threshold, dtype=every.dtype).log()
    else:
        rows = len(heads) * memory
        rows = int(rows * (1 - floor_ratio)) if floor_ratio else rows
        chosen = _best(every, rows)
    lengths = [len(head) for head in heads]
    masks = list(chosen.split(lengths))
    if floor_ratio and threshold is None:
        # Of equal borders, the code takes the left: the head that ends where the row stands.
        ends = torch.tensor(lengths).cumsum(dim=0)
        of_head = torch.bucketize(chosen.nonzero().flatten(), ends, right=counting == "exact")
        counts = of_head.bincount(minlength=len(heads)).tolist()
        floor = int(memory * floor_ratio)
        masks = [_best(head, count + floor) for head, count in zip(heads, counts, strict=True)]
    found = iter(masks)
    return [[next(found) for _ in layer] for layer in scores]


def _best(scores: Tensor, rows: int) -> Tensor:
    """Mask of the rows with the highest scores, ``[T]``; of equal ones the later."""
    order = scores.flip(0).argsort(stable=True, descending=True)[:rows]
    return torch.zeros(len(scores), dtype=torch.bool).scatter(0, len(scores) - 1 - order, True)


def _newest_first_of_equals(scores: Tensor, present: Tensor) -> Tensor:
    """Ranks of all rows of a sequence by score, then by age, int64 ``[B, H, T]``; high is good."""
    columns = scores.mT.flatten(1)  # oldest rows of all heads first
    order = columns.argsort(dim=1, stable=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter(1, order, places)
    ranks = ranks.unflatten(1, (scores.shape[2], scores.shape[1])).mT
    return ranks.masked_fill(~present, -1)
