"""Writing in a decode step what policies say of new rows, in fixed shapes and without a wait."""

import torch
from torch import Tensor


def write_marks(track: Tensor, numbers: Tensor, rows: Tensor, live: Tensor) -> None:
    """Write numbers of the new row of every slot and KV head that takes part.

    Args:
        track: ``[W, H_kv, R]``, or the pools of slots whose heads have segments, ``[W, H_kv * R]``;
            changed in place.
        numbers: ``[W, H_kv]``.
        rows: Rows before the step, ``[W, H_kv]``, int64. A slab that is full has dropped a row: the
            new one is its last. In pools, places of the new rows.
        live: Slots that take part, bool ``[W]``.
    """
    place = rows.clamp(max=track.shape[-1] - 1)
    if track.dim() == 3:
        place, numbers = place[..., None], numbers[..., None]
    before = track.gather(-1, place)
    taken = live.view(-1, *[1] * (track.dim() - 1))
    track.scatter_(-1, place, torch.where(taken, numbers.to(track.dtype), before))


def put_states(ring: Tensor, states: Tensor, place: Tensor, live: Tensor) -> None:
    """Put one state of every slot that takes part into a ring.

    Args:
        ring: States of the slots, ``[S, N, M]``; changed in place.
        states: ``[W, M]``, of the first slots.
        place: Where each goes, ``[W]``, int64.
        live: Slots that take part, bool ``[W]``.
    """
    served = ring[: len(states)]
    place = place.clamp(max=ring.shape[1] - 1)[:, None, None].expand(-1, 1, ring.shape[2])
    new = torch.where(live[:, None, None], states[:, None].to(ring.dtype), served.gather(1, place))
    served.scatter_(1, place, new)
