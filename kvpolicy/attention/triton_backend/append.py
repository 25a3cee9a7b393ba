"""Appending: the new row of each sequence is written behind those it holds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpolicy.attention.base import DecodeLayer
from kvpolicy.attention.triton_backend.rows import segment
from kvpolicy.attention.triton_backend.stored_rows import forms_of, store_row, strides_of
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
    exact_keys,
    exact_values,
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
    keys_slot,
    keys_head,
    keys_row,
    values_slot,
    values_head,
    values_row,
    exact_keys_slot,
    exact_values_slot,
    position_slot,
    position_head,
    position_row,
    window_slot,
    rows_slot,
    bounds_slot,
    CAPACITY: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_UNIT: tl.constexpr,
    KEY_EXACT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_BLOCK: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    VALUE_EXACT: tl.constexpr,
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
        new_key = key + slot * key_slot + head * key_head
        new_value = value + slot * value_slot + head * value_head
        at = row_start(slot, place, row, keys_slot, keys_head, keys_row) * KEY_UNIT
        store_row(new_key, keys + at, DIM, DIM_BLOCK, KEY_BITS, KEY_SIZE)
        at = row_start(slot, place, row, values_slot, values_head, values_row) * VALUE_UNIT
        store_row(new_value, values + at, VALUE_DIM, VALUE_DIM_BLOCK, VALUE_BITS, VALUE_SIZE)
        if KEY_EXACT > 0:
            at = slot * exact_keys_slot + (head * KEY_EXACT + position % KEY_EXACT) * DIM
            store_row(new_key, exact_keys + at, DIM, DIM_BLOCK, 0, DIM)
        if VALUE_EXACT > 0:
            at = slot * exact_values_slot
            at += (head * VALUE_EXACT + position % VALUE_EXACT) * VALUE_DIM
            store_row(new_value, exact_values + at, VALUE_DIM, VALUE_DIM_BLOCK, 0, VALUE_DIM)
        at = row_start(slot, place, row, position_slot, position_head, position_row)
        tl.store(positions + at, position)
        if WINDOW_SIZE > 0:
            g, d = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
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
        layer: The layer, changed but for its tracks. Where it slides, a full slab has dropped its
            oldest row and takes the new one as its last.
        query: After RoPE, ``[W, H_q, D]``.
        key: After RoPE, ``[W, H_kv, D]``.
        value: ``[W, H_kv, V]``.
        factor: What queries are multiplied by before they are stored.
    """
    keys, values, positions, window = layer.keys, layer.values, layer.positions, layer.window
    rows, bounds = layer.rows, layer.bounds
    query, key, value = (
        new if new.stride(-1) == 1 else new.contiguous() for new in (query, key, value)
    )
    group = query.shape[1] // keys.shape[1]
    assert window is None or window[0].is_contiguous(), "the window of one slot is one block"
    _append[*keys.shape[:2],](
        query,
        key,
        value,
        keys,
        values,
        positions,
        keys if window is None else window,
        keys if layer.exact_keys is None else layer.exact_keys,
        values if layer.exact_values is None else layer.exact_values,
        rows,
        layer.seq_len,
        layer.live.view(torch.uint8),
        rows if bounds is None else bounds,
        factor,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *strides_of(layer),
        *row_strides(positions),
        0 if window is None else window.stride(0),
        rows.stride(0),
        0 if bounds is None else bounds.stride(0),
        CAPACITY=keys.shape[2],
        **forms_of(layer, key.shape[2], value.shape[2]),
        GROUP=group,
        GROUP_BLOCK=power_of_2(group),
        WINDOW_SIZE=0 if window is None else window.shape[2],
        SLIDES=layer.slides,
        RESCALED=factor != 1,
        RAGGED=bounds is not None,
    )
