"""Where the rows of each KV head lie in a slot whose heads hold different numbers of rows.

The slab of a slot, ``[H_kv, capacity, ...]``, is seen as one pool of ``H_kv * capacity`` rows. Each
head has a segment of it: its rows, oldest first, and free rows behind them. A table of the slot has
the *bounds* of the segments, ``[H_kv + 1]``: head h has the places from ``bounds[h]`` up to
``bounds[h + 1]``. Empty slots have ``bounds[h] = h * capacity``, the layout of any other slab.

Every token adds a row to each head. So the heads of a slot always have equally many free rows,
which the host counts without the table: ``capacity - rows``, where ``rows`` is the number of rows
that a head holds in the mean, rounded up. Rows are *numbered* so that the newest row of every head
is number ``rows - 1`` and the next is number ``rows``; the oldest row of a head that holds more
rows than that has a negative number, that of a head that holds fewer a positive one. Row n of head
h lies at place ``bounds[h + 1] - capacity + n``.
"""

import torch
from torch import Tensor


def even_bounds(num_heads: int, capacity: int, device: torch.device) -> Tensor:
    """The bounds of heads that have ``capacity`` places each, ``[H_kv + 1]``."""
    return torch.arange(num_heads + 1, dtype=torch.int64, device=device) * capacity


def packed_bounds(counts: Tensor, num_free: int) -> Tensor:
    """The bounds of segments that lie side by side.

    Args:
        counts: Rows of each head, ``[B, H_kv]``.
        num_free: Free rows behind the rows of each head.

    Returns:
        ``[B, H_kv + 1]``.
    """
    ends = (counts + num_free).cumsum(dim=1)
    return torch.cat([torch.zeros_like(ends[:, :1]), ends], dim=1)


def places_of(bounds: Tensor, capacity: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The places of rows by their number, and which of these rows there are.

    Args:
        bounds: ``[B, H_kv + 1]``.
        capacity: Rows that a head has room for in the mean.
        numbers: ``[T]``, or ``[B, 1, T]`` where they differ.

    Returns:
        Places in the pool of the slot, ``[B, H_kv, T]``, int64, the first of the head for rows that
        it does not have; and whether it has them, bool.
    """
    first = bounds[:, :-1, None]
    places = bounds[:, 1:, None] - capacity + numbers
    has = places >= first
    return torch.maximum(places, first), has


def stretched(pool: Tensor, bounds: Tensor, wider: Tensor, by: int) -> None:
    """Copy pools to larger ones, in which every head has so many more free rows.

    Args:
        pool: ``[S, H_kv, capacity, ...]``.
        bounds: Its bounds, ``[S, H_kv + 1]``.
        wider: ``[S, H_kv, capacity + by, ...]``, changed in place.
        by: Rows added to each head.
    """
    num_slots, num_places = len(pool), pool.shape[1] * pool.shape[2]
    places = torch.arange(num_places, device=pool.device).expand(num_slots, -1)
    head = torch.searchsorted(bounds[:, 1:-1].contiguous(), places.contiguous(), right=True)
    slots = torch.arange(num_slots, device=pool.device)[:, None]
    wider.flatten(1, 2)[slots, places + head * by] = pool.flatten(1, 2)
