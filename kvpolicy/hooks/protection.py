"""Protection: which rows stay whatever they score."""

import torch
from torch import Tensor


def protected_rows(
    positions: Tensor, first: int, newest: int, answers: list[Tensor], budget: int
) -> Tensor | None:
    """The rows that stay in any case, as far as they fit into the budget.

    Args:
        positions: Position of each row's token, ``[B, H_kv, T]``, rising; -1 where there is no row.
        first: First tokens of a sequence that policies declare to protect.
        newest: Newest rows that policies declare to protect; with ``first`` they fit.
        answers: Rows that policies protect by their hook, bool ``[B, H_kv, T]`` each.
        budget: Rows that stay.

    Returns:
        Bool ``[B, H_kv, T]``; of rows that only ``answers`` name, the newest that fit beside the
        declared ones. ``None``: no row is protected.
    """
    if not (first or newest or answers):
        return None
    present = positions >= 0  # heads that share their rows may have none in the first columns
    declared = _declared(positions, first, newest, present)
    if not answers:
        return declared
    wanted = answers[0]
    for answer in answers[1:]:
        wanted = wanted | answer
    wanted = wanted & present
    if declared is not None:
        wanted = wanted & ~declared
    room: int | Tensor = budget
    if declared is not None:
        room = budget - declared.sum(dim=2, keepdim=True)
    newer = wanted.flip(2).cumsum(dim=2).flip(2)  # of the wanted rows, this one included
    fitting = wanted & (newer <= room)
    return fitting if declared is None else fitting | declared


def _declared(positions: Tensor, first: int, newest: int, present: Tensor) -> Tensor | None:
    if not first and not newest:
        return None
    num_rows = positions.shape[2]
    rows = torch.arange(num_rows, device=positions.device) >= num_rows - newest
    return ((positions < first) | rows if first else rows) & present
