"""Appending: the new row of each sequence is written behind those it holds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpolicy.attention.base import DecodeLayer
from kvpolicy.attention.triton_backend.rows import segment
from kvpolicy.triton_common import power_of_2, row_start, row_strides


@triton.jit
def _append(
    query,
    key,
    value,
    keys,
    values,
    positions,
    window,
    rows,
    seq_len,
    live,
    bounds,
    factor,
    query_slot,
    query_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    slab_slot,
    slab_head,
    slab_row,
    position_slot,
    position_head,
    position_row,
    window_slot,
    rows_slot,
    bounds_slot,
    CAPACITY: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    WINDOW_SIZE: tl.constexpr,
    SLIDES: tl.constexpr,
    RESCALED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + slot * rows_slot + head).to(tl.int32)
    if SLIDES:  # a full slab has dropped its oldest row
        row = tl.minimum(row, CAPACITY - 1)
    # What lies behind a slab belongs to another sequence.
    if (tl.load(live + slot) != 0) & (row < CAPACITY):
        position = tl.load(seq_len + slot)
        place = head
        if RAGGED:
            first, held = segment(bounds, slot, head, bounds_slot, row + 1, CAPACITY)
            place, row = 0, first + held - 1
        d = tl.arange(0, DIM_BLOCK)
        ok = d < DIM
        at = row_start(slot, place, row, slab_slot, slab_head, slab_row)
        new = tl.load(key + slot * key_slot + head * key_head + d, mask=ok)
        tl.store(keys + at + d, new.to(keys.dtype.element_ty), mask=ok)
        new = tl.load(value + slot * value_slot + head * value_head + d, mask=ok)
        tl.store(values + at + d, new.to(values.dtype.element_ty), mask=ok)
        at = row_start(slot, place, row, position_slot, position_head, position_row)
        tl.store(positions + at, position)
        if WINDOW_SIZE > 0:
            g = tl.arange(0, GROUP_BLOCK)
            mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
            query_at = slot * query_slot + (head * GROUP + g) * query_head
            new = tl.load(query + query_at[:, None] + d[None, :], mask=mask)
            if RESCALED:
                new = (new.to(tl.float32) * factor).to(query.dtype.element_ty)
            entry = (head * GROUP + g) * WINDOW_SIZE + position % WINDOW_SIZE
            at = slot * window_slot + entry[:, None] * DIM + d[None, :]
            tl.store(window + at, new.to(window.dtype.element_ty), mask=mask)


def append(
    layer: DecodeLayer, query: Tensor, key: Tensor, value: Tensor, *, factor: float = 1.0
) -> None:
    """Write the new token's key, value and position, and its query into the query window, in place.

    Args:
        layer: The layer, changed but for its tracks; keys and values have equal strides. Where it
            slides, a full slab has dropped its oldest row and takes the new one as its last.
        query: After RoPE, ``[W, H_q, D]``.
        key: After RoPE, ``[W, H_kv, D]``.
        value: ``[W, H_kv, D]``.
        factor: What queries are multiplied by before they are stored.
    """
    keys, values, positions, window = layer.keys, layer.values, layer.positions, layer.window
    rows, bounds = layer.rows, layer.bounds
    query, key, value = (
        new if new.stride(-1) == 1 else new.contiguous() for new in (query, key, value)
    )
    capacity, dim = keys.shape[2:]
    group = query.shape[1] // keys.shape[1]
    assert row_strides(keys) == row_strides(values), "keys and values lie alike"
    assert window is None or window[0].is_contiguous(), "the window of one slot is one block"
    _append[*keys.shape[:2],](
        query,
        key,
        value,
        keys,
        values,
        positions,
        keys if window is None else window,
        rows,
        layer.seq_len,
        layer.live.view(torch.uint8),
        rows if bounds is None else bounds,
        factor,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *row_strides(keys),
        *row_strides(positions),
        0 if window is None else window.stride(0),
        rows.stride(0),
        0 if bounds is None else bounds.stride(0),
        CAPACITY=capacity,
        DIM=dim,
        DIM_BLOCK=power_of_2(dim),
        GROUP=group,
        GROUP_BLOCK=power_of_2(group),
        WINDOW_SIZE=0 if window is None else window.shape[2],
        SLIDES=layer.slides,
        RESCALED=factor != 1,
        RAGGED=bounds is not None,
    )
