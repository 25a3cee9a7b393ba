"""Sliding windows: which rows of a layer no later query can see, and how they are dropped.

A query at position p sees the rows at positions above ``p - window``. The positions in a slab
are distinct, so if it holds more rows than the window is long, its first rows are outside the
window in every KV head, whatever policies have kept there. Between compactions windows therefore
slide by counting rows: no position is read from the device.

A compaction reads positions. It first drops the rows that are outside the window in all heads.
Rows that are outside it in some heads only stay stored, are hidden from attention, and get the
lowest score.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.slab import KVCache, slot_index


def drop_oldest(cache: KVCache, layer_idx: int, slots: Sequence[int], num: int) -> None:
    """Drop the first rows of slots of one layer; the others move up.

    Args:
        cache: The KV cache; changed in place.
        layer_idx: Decoder layer, counted from 0.
        slots: Slots that hold equally many rows, in rising order.
        num: Rows to drop in every KV head.
    """
    layer = cache.layers[layer_idx]
    num_rows = int(cache.rows[layer_idx, slots[0]])
    target = slot_index(slots)
    staying, freed = slice(num, num_rows), slice(num_rows - num, num_rows)
    for slab in (layer.keys, layer.values, layer.positions, *layer.tracks.values()):
        moved = slab[target, :, staying]
        if isinstance(target, slice):  # a slice is a view, a list of slots already a copy
            moved = moved.clone()
        slab[target, :, : num_rows - num] = moved
        cache.note_copy(moved.nbytes)
        del moved  # free it before the next copy is made
    layer.positions[target, :, freed] = -1
    for track in layer.tracks.values():
        track[target, :, freed] = 0
    cache.drop_first(layer_idx, slots, num)


def num_expired(of_each: Sequence[LayerRows]) -> list[int]:
    """Rows of each sequence that no later query can see in any KV head; they come first.

    Without those of a prompt that stays, see `KVCache.num_hidden_prompt_rows`.

    Reads the positions of all layers at once: between compactions that leave gaps, only the device
    knows them.
    """
    counts = [
        expired.sum(dim=2).amin() for rows in of_each if (expired := rows.out_of_sight) is not None
    ]
    assert len(counts) == len(of_each), "these layers have a sliding window"
    return torch.stack([count.to(counts[0].device) for count in counts]).tolist()


def concat_rows(
    slab: Tensor, new: Tensor | int, where: tuple[Tensor, Tensor], num_rows: int, empty: int
) -> Tensor:
    """The rows of a slab followed by new rows, as a new tensor.

    Args:
        slab: ``[B, H_kv, capacity, ...]``.
        new: Contents of the new rows, ``[N, H_kv, ...]``.
        where: Slot and row of each new row, ``[N]`` each.
        num_rows: Rows of the fullest slot.
        empty: Value of empty rows.

    Returns:
        ``[B, H_kv, num_rows, ...]``.
    """
    shape = (*slab.shape[:2], num_rows, *slab.shape[3:])
    rows = slab.new_full(shape, empty)
    held = slab[:, :, :num_rows]
    rows[:, :, : held.shape[2]] = held
    rows[where[0], :, where[1]] = new
    return rows


def seen_in_window(positions: Tensor, query_positions: np.ndarray, window: int) -> Tensor:
    """Rows inside the window of each query, bool ``[B, H_kv, L, T]``.

    Args:
        positions: Position of each row's token, ``[B, H_kv, T]``.
        query_positions: Position of each query, ``[B, L]``.
        window: Tokens a query sees, its own included.
    """
    oldest = torch.from_numpy(query_positions - window).to(positions.device)
    return positions[:, :, None, :] > oldest[:, None, :, None]
