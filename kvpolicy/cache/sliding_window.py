"""Sliding windows: which rows of a layer nobody will look at again, and how they leave.

A query at position p sees the rows at positions above ``p - window``. The positions of a slab
are distinct; so of so many rows that they exceed the window, the first ones are out of it in
every KV head, whatever policies have kept there. Windows slide by counting rows: no position
has to be read from the device.

Only at compactions are positions looked at: what has left the window in all heads is dropped
then. What has left it in some heads only stays in its place, hidden from attention, and is the
first to be offered.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.slab import Cache


def drop_oldest(cache: Cache, layer_idx: int, slots: Sequence[int], num: int) -> None:
    """Drop the first rows of slots of one layer; the others move up.

    Args:
        cache: The slabs; changed in place.
        layer_idx: Decoder layer, counted from 0.
        slots: Slots that hold equally many rows.
        num: Rows to drop in every KV head.
    """
    layer = cache.layers[layer_idx]
    num_rows = int(cache.rows[layer_idx, slots[0]])
    first, last = slots[0], slots[-1] + 1
    target = slice(first, last) if len(slots) == last - first else list(slots)
    staying, left = slice(num, num_rows), slice(num_rows - num, num_rows)
    for slab in (layer.keys, layer.values, layer.positions, *layer.tracks.values()):
        moved = slab[target, :, staying]
        if isinstance(target, slice):  # of a list it is a copy already
            moved = moved.clone()
        slab[target, :, : num_rows - num] = moved
        cache.needed_copy(moved.nbytes)
        del moved  # before the next one is made
    layer.positions[target, :, left] = -1
    for track in layer.tracks.values():
        track[target, :, left] = 0
    cache.rows[layer_idx, slots] -= num


def drop_expired(cache: Cache, layer_idx: int, slots: Sequence[int]) -> None:
    """Drop what no later query of some slots can see in any head of one layer, wherever it is."""
    layer = cache.layers[layer_idx]
    window = layer.shape.sliding_window
    if window is None:
        return
    positions = layer.positions[list(slots)]
    oldest = torch.from_numpy(cache.seq_len[list(slots)] - window).to(positions.device)
    expired = (positions >= 0) & (positions <= oldest[:, None, None])
    by_head = layer.shape.peers.all_gather(expired.sum(dim=2))  # [B, H_kv]
    for slot, num in zip(slots, by_head.amin(dim=1).tolist(), strict=True):
        if num:
            drop_oldest(cache, layer_idx, [slot], num)


def concat_rows(
    slab: Tensor, new: Tensor | int, where: tuple[Tensor, Tensor], num_rows: int, empty: int
) -> Tensor:
    """The rows of a slab and new ones after them, in a tensor of their own.

    Args:
        slab: ``[B, H_kv, capacity, ...]``.
        new: Contents of the new rows, ``[N, H_kv, ...]``.
        where: Slot and row of each new row, ``[N]`` each.
        num_rows: Rows of the fullest slot.
        empty: What empty rows hold.

    Returns:
        ``[B, H_kv, num_rows, ...]``.
    """
    shape = (*slab.shape[:2], num_rows, *slab.shape[3:])
    rows = slab.new_full(shape, empty)
    held = slab[:, :, :num_rows]
    rows[:, :, : held.shape[2]] = held
    rows[where[0], :, where[1]] = new
    return rows


def seen_in_window(positions: Tensor, asked_at: np.ndarray, window: int) -> Tensor:
    """Rows that lie within the window of each query, bool ``[B, H_kv, L, T]``.

    Args:
        positions: Place of each row's token, ``[B, H_kv, T]``.
        asked_at: Position of each query, ``[B, L]``.
        window: Tokens a query sees, its own included.
    """
    oldest = torch.from_numpy(asked_at - window).to(positions.device)
    return positions[:, :, None, :] > oldest[:, None, :, None]
