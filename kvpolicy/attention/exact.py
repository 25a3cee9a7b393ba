"""Exact copies of the newest rows, beside rows in few bits.

At 4 bits the rounding of the newest rows costs most. A ring of each slot and KV head therefore has
the rows of the ``E`` newest tokens of its sequence as they are: that of position p at place
``p % E``. The query at position p reads from it the rows at positions above ``p - E``, its own
included, and others as their integers say. So what a query reads depends on positions alone, and
not on how the tokens before it have come.

Rows are found in a ring by their positions: one that is moved is the same row, and one that is
evicted is not looked up. Shapes: ``B`` slots, ``T`` rows of each KV head, ``D`` channels.
"""

import torch
from torch import Tensor


def newest_columns(positions: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The newest rows of each head, oldest first.

    Args:
        positions: Position of each row, ``[B, H_kv, T]``, -1 where there is none.
        num: How many are wanted; ``T`` at most are given.

    Returns:
        Their positions and their columns, ``[B, H_kv, K]``; -1 and some column for missing ones.
    """
    found = positions.topk(min(num, positions.shape[2]), dim=2)
    return found.values.flip(2), found.indices.flip(2)


def taken_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Rows ``[B, H_kv, T, D]`` at some columns, ``[B, H_kv, K]``, of each head."""
    return rows.gather(2, columns[..., None].expand(-1, -1, -1, rows.shape[3]))


def with_exact(rows: Tensor, positions: Tensor, ring: Tensor, newest: Tensor) -> Tensor:
    """Put exact copies in the place of rows that integers stand for.

    Args:
        rows: What the integers stand for, ``[B, H_kv, T, D]``; changed in place.
        positions: Position of each row, ``[B, H_kv, T]``, -1 where there is none.
        ring: The exact copies, ``[B, H_kv, E, D]``.
        newest: Position of the query, or of the newest token, ``[B]``; its row is in the ring.
    """
    size = ring.shape[2]
    at, columns = newest_columns(positions, size)
    is_exact = _is_exact(at, newest, size)
    exact = taken_columns(ring, at.clamp(min=0) % size)
    chosen = torch.where(is_exact[..., None], exact, taken_columns(rows, columns))
    index = columns[..., None].expand_as(chosen)
    return rows.scatter_(2, index, chosen)


def replaced(ring: Tensor, positions: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
    """A ring in which some rows of the newest tokens are others.

    Args:
        ring: The exact copies, ``[B, H_kv, E, D]``.
        positions: Positions of the rows, ``[B, H_kv, T]``, -1 where there is none.
        rows: What they are now, ``[B, H_kv, T, D]``.
        newest: Position of the newest token, ``[B]``.
    """
    size = ring.shape[2]
    at, columns = newest_columns(positions, size)
    # Rows that the ring does not have go behind it.
    places = torch.where(_is_exact(at, newest, size), at % size, size)
    new = taken_columns(rows, columns)
    wider = torch.cat([ring, ring[:, :, :1]], dim=2)
    return wider.scatter_(2, places[..., None].expand_as(new), new)[:, :, :size]


def _is_exact(positions: Tensor, newest: Tensor, size: int) -> Tensor:
    """Which rows at some positions, ``[B, H_kv, K]``, a ring of some size has."""
    return (positions >= 0) & (positions > (newest - size)[:, None, None])
