"""Attention of the tokens of prompts over rows, by softmax weights, for GPUs.

For what torch's fused kernels do not give: what each row receives of all queries, soft caps, and
learned sinks. No weight is written to memory. The first kernel attends from a block of queries, one
tile of rows after the other (online softmax, as FlashAttention does), and keeps the logarithm of
what each query divides by. With it, a weight is known from its logit alone. So the second kernel
goes over the same tiles once more, from a block of rows to the queries that see them, and adds up.
No atomics: the same input gives the same bits.

Sequences may have different numbers of tokens, padded on the left, and of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.triton_backend.softmax import (
    add_to_track,
    capped,
    divisor_for,
    shift_for,
)
from kvpolicy.triton_common import (
    LEAST_OF_DOT,
    dot,
    power_of_2,
    row_start,
    row_strides,
    rows_at_once,
)


# Prompts have any number of tokens and rows: no kernel is compiled anew for it. But this one is
# compiled twice: it needs fewer registers where the tokens of a chunk are a multiple of 16.
@triton.jit(do_not_specialize=["reach", "sizes_row"])
def _attend_queries(
    query,
    keys,
    values,
    sizes,
    sinks,
    out,
    divisors,
    scaling,
    width,
    reach,
    query_slot,
    query_head,
    query_token,
    keys_slot,
    keys_head,
    keys_row,
    values_slot,
    values_head,
    values_row,
    sizes_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Online softmax of a block of queries of one head over the rows of their sequence."""
    head, slot = tl.program_id(1), tl.program_id(2)
    first_column = tl.program_id(0) * QUERIES
    first_token = width - tl.load(sizes + slot).to(tl.int32)  # the columns before it are pads
    before = tl.load(sizes + sizes_row + slot).to(tl.int32) - width  # rows before column 0
    column = first_column + tl.arange(0, QUERIES)
    newest = before + column  # the row of each query's own token
    is_query = (column < width) & (column >= first_token)
    d, v_d = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_DIM_BLOCK)
    query_at = row_start(slot, head, column, query_slot, query_head, query_token)
    q = tl.load(
        query + query_at[:, None] + d[None, :],
        mask=is_query[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    output = tl.zeros((QUERIES, VALUE_DIM_BLOCK), tl.float32)
    start, end = 0, before + tl.minimum(first_column + QUERIES, width)
    if WINDOW:
        start = tl.maximum(before + tl.maximum(first_column, first_token) - reach + 1, 0)
    if first_column + QUERIES <= first_token:
        end = start  # of pads alone
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < end
        seen = is_query[:, None] & (row[None, :] <= newest[:, None])
        if WINDOW:
            seen = seen & (row[None, :] > newest[:, None] - reach)
        at = row_start(slot, head // GROUP, row, keys_slot, keys_head, keys_row)
        k = tl.load(
            keys + at[:, None] + d[None, :], mask=is_row[:, None] & (d < DIM)[None, :], other=0.0
        )
        x = capped(dot(q, tl.trans(k)) * scaling, SOFTCAP)
        x = tl.where(seen, x, float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        shift = shift_for(new_top)
        p = tl.exp(x - shift[:, None])
        fade = tl.exp(top - shift)
        total = total * fade + tl.sum(p, 1)
        at = row_start(slot, head // GROUP, row, values_slot, values_head, values_row)
        v = tl.load(
            values + at[:, None] + v_d[None, :],
            mask=is_row[:, None] & (v_d < VALUE_DIM)[None, :],
            other=0.0,
        )
        output = output * fade[:, None] + dot(p.to(v.dtype), v)
        top = new_top
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        new_top = tl.maximum(top, sink)
        shift = shift_for(new_top)
        fade = tl.exp(top - shift)
        total = total * fade + tl.exp(sink - shift)
        output = output * fade[:, None]
        top = new_top
    total = divisor_for(total)
    at = (slot.to(tl.int64) * width + column) * HEADS + head
    tl.store(
        out + at[:, None] * VALUE_DIM + v_d[None, :],
        (output / total[:, None]).to(out.dtype.element_ty),
        mask=(column < width)[:, None] & (v_d < VALUE_DIM)[None, :],
    )
    at = (slot * HEADS + head).to(tl.int64) * width + column
    tl.store(divisors + at, shift_for(top) + tl.log(total), mask=column < width)


@triton.jit(do_not_specialize=["width", "reach", "sizes_row", "track_slot", "track_head"])
def _add_up(
    query,
    keys,
    sizes,
    divisors,
    sums,
    squares,
    squares_logit,
    squares_logit2,
    scaling,
    width,
    reach,
    query_slot,
    query_head,
    query_token,
    keys_slot,
    keys_head,
    keys_row,
    track_slot,
    track_head,
    track_row,
    sizes_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SUMS: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_LOGIT: tl.constexpr,
    SQUARES_LOGIT2: tl.constexpr,
):
    """What a block of rows of one KV head receives from all queries of its group."""
    kv_head, slot = tl.program_id(1), tl.program_id(2)
    first_row = tl.program_id(0) * ROWS
    first_token = width - tl.load(sizes + slot).to(tl.int32)
    num_rows = tl.load(sizes + sizes_row + slot).to(tl.int32)
    before = num_rows - width
    row = first_row + tl.arange(0, ROWS)
    is_row = row < num_rows
    d = tl.arange(0, DIM_BLOCK)
    key_at = row_start(slot, kv_head, row, keys_slot, keys_head, keys_row)
    k = tl.load(
        keys + key_at[:, None] + d[None, :], mask=is_row[:, None] & (d < DIM)[None, :], other=0.0
    )
    # Columns of the queries that see one of these rows.
    start, end = tl.maximum(first_row - before, first_token), width
    if WINDOW:
        end = tl.minimum(first_row + ROWS - 1 + reach - before, width)
    if first_row >= num_rows:
        end = start
    received = tl.zeros((ROWS,), tl.float32)
    of_squares = tl.zeros((ROWS,), tl.float32)
    of_logit = tl.zeros((ROWS,), tl.float32)
    of_logit2 = tl.zeros((ROWS,), tl.float32)
    # One loop over all blocks of all heads, so that queries are copied ahead across heads, too.
    num_blocks = tl.maximum(tl.cdiv(end - start, QUERIES), 0)
    for i in range(GROUP * num_blocks):
        head = kv_head * GROUP + i // num_blocks
        column = start + i % num_blocks * QUERIES + tl.arange(0, QUERIES)
        is_query = column < end
        query_at = row_start(slot, head, column, query_slot, query_head, query_token)
        q = tl.load(
            query + query_at[:, None] + d[None, :],
            mask=is_query[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        divisor_at = (slot * HEADS + head).to(tl.int64) * width + column
        divisor = tl.load(divisors + divisor_at, mask=is_query, other=0.0)
        x = capped(dot(k, tl.trans(q)) * scaling, SOFTCAP)
        newest = before + column
        seen = is_query[None, :] & is_row[:, None] & (row[:, None] <= newest[None, :])
        if WINDOW:
            seen = seen & (row[:, None] > newest[None, :] - reach)
        weight = tl.exp(tl.where(seen, x, float("-inf")) - divisor[None, :])
        if SUMS:
            received += tl.sum(weight, 1)
        if SQUARES or SQUARES_LOGIT or SQUARES_LOGIT2:
            weight = weight * weight
            of_squares += tl.sum(weight, 1)
        if SQUARES_LOGIT or SQUARES_LOGIT2:
            weight = weight * x
            of_logit += tl.sum(weight, 1)
        if SQUARES_LOGIT2:
            of_logit2 += tl.sum(weight * x, 1)
    at = row_start(slot, kv_head, row, track_slot, track_head, track_row)
    if SUMS:
        add_to_track(sums + at, received, is_row)
    if SQUARES:
        add_to_track(squares + at, of_squares, is_row)
    if SQUARES_LOGIT:
        add_to_track(squares_logit + at, of_logit, is_row)
    if SQUARES_LOGIT2:
        add_to_track(squares_logit2 + at, of_logit2, is_row)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sizes: Tensor,
    accumulated: list[Tensor],
    accumulators: list[str],
    *,
    reach: int = 0,
    scaling: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from new tokens to rows, of which those of the new tokens are the last.

    Args:
        queries: After RoPE, ``[B, H_q, L, D]``; query head h belongs to KV head ``h // G``.
        keys: ``[B, H_kv, T, D]``, in the precision of ``queries``.
        values: ``[B, H_kv, T, V]``, likewise.
        sizes: Tokens of each sequence, the columns before which are pads, and its rows, int64
            ``[2, B]``. Rows behind these are not read.
        accumulated: What rows accumulate, ``[B, H_kv, T]`` each, fp32, of equal strides; changed
            in place.
        accumulators: Their names, see `kvpolicy.attention.accumulators`.
        reach: How many rows a query sees, its own included; 0: all up to its own.
        scaling: Factor on the logits.
        softcap: See `kvpolicy.attention.base.Decode`.
        sinks: See there.

    Returns:
        ``[B, H_q, L, V]``, in the order ``[B, L, H_q, V]`` of memory, as models go on; zeros for
        pads.
    """
    queries, keys, values = (
        one if one.stride(3) == 1 else one.contiguous() for one in (queries, keys, values)
    )
    (num_sequences, num_heads, width, dim), (num_kv_heads, num_rows) = (
        queries.shape,
        keys.shape[1:3],
    )
    value_dim = values.shape[3]
    tile = rows_at_once(max(dim, value_dim), queries.dtype.itemsize)
    forms = {
        "HEADS": num_heads,
        "GROUP": num_heads // num_kv_heads,
        "DIM": dim,
        "DIM_BLOCK": max(power_of_2(dim), LEAST_OF_DOT),
        "QUERIES": tile,
        "SOFTCAP": softcap,
        "WINDOW": reach > 0,
    }
    out = values.new_empty(num_sequences, width, num_heads, value_dim)
    divisors = queries.new_empty((num_sequences, num_heads, width), dtype=torch.float32)
    given = scaling, width, reach, *queries.stride()[:3], *row_strides(keys)
    _attend_queries[triton.cdiv(width, tile), num_heads, num_sequences](
        queries,
        keys,
        values,
        sizes,
        out if sinks is None else sinks,
        out,
        divisors,
        *given,
        *row_strides(values),
        sizes.stride(0),
        VALUE_DIM=value_dim,
        VALUE_DIM_BLOCK=max(power_of_2(value_dim), LEAST_OF_DOT),
        ROWS=max(tile // 2, LEAST_OF_DOT),
        SINKS=sinks is not None,
        **forms,
    )
    if accumulated:
        by_name = dict(zip(accumulators, accumulated, strict=True))
        strides = {row_strides(track) for track in accumulated}
        assert len(strides) == 1, "tracks that accumulate lie alike"
        _add_up[triton.cdiv(num_rows, tile), num_kv_heads, num_sequences](
            queries,
            keys,
            sizes,
            divisors,
            *(by_name.get(name, divisors) for name in ACCUMULATORS),
            *given,
            *strides.pop(),
            sizes.stride(0),
            ROWS=tile,
            **{name.removeprefix("attn_").upper(): name in by_name for name in ACCUMULATORS},
            **forms,
        )
    return out.transpose(1, 2)
