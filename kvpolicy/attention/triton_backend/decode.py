"""Attention of one new token per sequence over its slab, for GPUs.

The rows of a slab are cut into chunks, so that few sequences keep a whole GPU busy (split-K). The
first kernel attends to one chunk: the query heads of a group share the keys and values that it
reads. The second kernel brings the chunks together and, if policies ask for it, updates what each
row accumulates; it reads logits that the first one has kept, because recomputing them reads
all keys again. Where there is one chunk, the first kernel does all of it. No atomics: the same
input gives the same bits.

How many rows count is read on the device, so that one launch configuration, held in a CUDA graph,
serves every step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.base import DecodeLayer, window_factor
from kvpolicy.attention.chunks import BLOCK, DEFAULT_PROCESSORS, chunks_of
from kvpolicy.attention.triton_backend.append import append
from kvpolicy.attention.triton_backend.compact import drop_oldest
from kvpolicy.attention.triton_backend.rows import num_held, segment
from kvpolicy.triton_common import dot, power_of_2, row_start, row_strides

_TENSOR_CORE_SIZE = 16  # `tl.dot` takes no smaller matrices


@triton.jit
def _attend_chunk(
    query,
    keys,
    values,
    positions,
    rows,
    seq_len,
    live,
    bounds,
    chunk_top,
    chunk_total,
    chunk_output,
    logits,
    sinks,
    out,
    sums,
    squares,
    squares_logit,
    squares_logit2,
    scaling,
    query_slot,
    query_head,
    slab_slot,
    slab_head,
    slab_row,
    position_slot,
    position_head,
    position_row,
    track_slot,
    track_head,
    track_row,
    rows_slot,
    bounds_slot,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    SINKS: tl.constexpr,
    SUMS: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_LOGIT: tl.constexpr,
    SQUARES_LOGIT2: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Online softmax of one group of query heads over one chunk of rows of one slot."""
    KEEP_LOGITS: tl.constexpr = SUMS or SQUARES or SQUARES_LOGIT or SQUARES_LOGIT2
    slot, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    held = num_held(rows, slot, head, live, rows_slot, CAPACITY)
    place, before = head, 0  # the head of a row in the slab, and the rows there before its first
    if RAGGED:
        place = 0
        before, held = segment(bounds, slot, head, bounds_slot, held, CAPACITY)
    g, d = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    is_head, is_dim = g < GROUP, d < DIM
    entry = (slot * HEADS + head).to(tl.int64)
    part = (entry * CHUNKS + chunk) * GROUP_BLOCK + g
    start = chunk * CHUNK
    stop = tl.minimum(start + CHUNK, held)
    top = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    output = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
    if start < stop:
        query_at = slot.to(tl.int64) * query_slot + (head * GROUP + g) * query_head
        q = tl.load(
            query + query_at[:, None] + d[None, :],
            mask=is_head[:, None] & is_dim[None, :],
            other=0.0,
        )
        if SLIDING_WINDOW > 0:
            oldest = tl.load(seq_len + slot) - SLIDING_WINDOW
        for first in range(start, stop, BLOCK):
            row = first + tl.arange(0, BLOCK)
            is_row = row < stop
            seen = is_row
            if SLIDING_WINDOW > 0:
                at = row_start(
                    slot, place, before + row, position_slot, position_head, position_row
                )
                seen = seen & (tl.load(positions + at, mask=is_row, other=-1) > oldest)
            at = row_start(slot, place, before + row, slab_slot, slab_head, slab_row)
            at = at[:, None] + d[None, :]
            stored = is_row[:, None] & is_dim[None, :]
            k = tl.load(keys + at, mask=stored, other=0.0)
            if TENSOR_CORES:
                x = dot(q, tl.trans(k))
            else:
                x = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], 2)
            x = x * scaling
            if SOFTCAP > 0:  # softcap * tanh(x / softcap)
                x = SOFTCAP * (2 * tl.sigmoid(2 * x / SOFTCAP) - 1)
            x = tl.where(seen[None, :], x, float("-inf"))
            if KEEP_LOGITS:
                at_logit = (entry * GROUP + g)[:, None] * CAPACITY + row[None, :]
                if RAGGED:  # in the place of the row, in the pool of each head of a group
                    of_slot = slot.to(tl.int64) * GROUP + g
                    at_logit = of_slot[:, None] * (HEADS * CAPACITY) + before + row[None, :]
                tl.store(logits + at_logit, x, mask=is_head[:, None] & is_row[None, :])
            new_top = tl.maximum(top, tl.max(x, 1))
            # -inf as long as no row is seen; -inf - -inf would be NaN.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp(x - shift[:, None])
            fade = tl.exp(top - shift)
            total = total * fade + tl.sum(p, 1)
            v = tl.load(values + at, mask=stored, other=0.0)
            if TENSOR_CORES:
                added = dot(p.to(v.dtype), v)
            else:
                added = tl.sum(p[:, :, None] * v.to(tl.float32)[None, :, :], 1)
            output = output * fade[:, None] + added
            top = new_top
        if CHUNKS > 1:
            tl.store(chunk_output + part[:, None] * DIM_BLOCK + d[None, :], output)
    if CHUNKS > 1:
        tl.store(chunk_top + part, top)
        tl.store(chunk_total + part, total)
    else:
        sink = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
        if SINKS:
            sink = tl.load(sinks + head * GROUP + g, mask=is_head, other=float("-inf"))
            sink = sink.to(tl.float32)
        shift = _shift(tl.maximum(top, sink))
        fade = tl.exp(top - shift)
        total = _divisor(tl.exp(sink - shift) + total * fade)
        at = ((entry * GROUP + g) * DIM)[:, None] + d[None, :]
        output = (output * (fade / total)[:, None]).to(out.dtype.element_ty)
        tl.store(out + at, output, mask=is_head[:, None] & is_dim[None, :])
        if KEEP_LOGITS:
            tl.debug_barrier()  # other threads have stored the logits
            for first in range(start, stop, BLOCK):
                row = first + tl.arange(0, BLOCK)
                _accumulate(
                    logits,
                    sums,
                    squares,
                    squares_logit,
                    squares_logit2,
                    shift,
                    total,
                    slot,
                    head,
                    place,
                    before,
                    row,
                    row < stop,
                    track_slot,
                    track_head,
                    track_row,
                    HEADS,
                    GROUP,
                    GROUP_BLOCK,
                    CAPACITY,
                    SUMS,
                    SQUARES,
                    SQUARES_LOGIT,
                    SQUARES_LOGIT2,
                    RAGGED,
                )


@triton.jit
def _shift(top):
    """What is taken from logits before their exponentials: -inf - -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _divisor(total):
    """What outputs are divided by: a query that sees no row gets zeros."""
    return tl.where(total > 0, total, 1.0)


@triton.jit
def _join_chunks(
    chunk_top,
    chunk_total,
    chunk_output,
    logits,
    sinks,
    out,
    sums,
    squares,
    squares_logit,
    squares_logit2,
    rows,
    live,
    bounds,
    track_slot,
    track_head,
    track_row,
    rows_slot,
    bounds_slot,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
    SUMS: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_LOGIT: tl.constexpr,
    SQUARES_LOGIT2: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Output of one group of query heads; program c updates what the rows of chunk c accumulate."""
    slot, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    held = num_held(rows, slot, head, live, rows_slot, CAPACITY)
    place, before = head, 0  # the head of a row in the slab, and the rows there before its first
    if RAGGED:
        place = 0
        before, held = segment(bounds, slot, head, bounds_slot, held, CAPACITY)
    g, d = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    is_head, is_dim = g < GROUP, d < DIM
    entry = (slot * HEADS + head).to(tl.int64)
    top = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    num_chunks = CHUNKS
    if RAGGED:  # there may be many more than those of a head
        num_chunks = tl.cdiv(held, CHUNK)
    for c in range(num_chunks):
        top = tl.maximum(top, tl.load(chunk_top + (entry * CHUNKS + c) * GROUP_BLOCK + g))
    sink = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + g, mask=is_head, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, sink)
    shift = _shift(top)
    total = tl.exp(sink - shift)
    for c in range(num_chunks):
        part = (entry * CHUNKS + c) * GROUP_BLOCK + g
        total += tl.load(chunk_total + part) * tl.exp(tl.load(chunk_top + part) - shift)
    total = _divisor(total)
    if chunk == 0:
        output = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
        for c in range(num_chunks):
            if c * CHUNK < held:
                part = (entry * CHUNKS + c) * GROUP_BLOCK + g
                share = tl.exp(tl.load(chunk_top + part) - shift)
                output += (
                    tl.load(chunk_output + part[:, None] * DIM_BLOCK + d[None, :]) * share[:, None]
                )
        at = ((entry * GROUP + g) * DIM)[:, None] + d[None, :]
        output = (output / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at, output, mask=is_head[:, None] & is_dim[None, :])
    if SUMS or SQUARES or SQUARES_LOGIT or SQUARES_LOGIT2:
        stop = tl.minimum((chunk + 1) * CHUNK, held)
        for first in range(chunk * CHUNK, stop, BLOCK):
            row = first + tl.arange(0, BLOCK)
            _accumulate(
                logits,
                sums,
                squares,
                squares_logit,
                squares_logit2,
                shift,
                total,
                slot,
                head,
                place,
                before,
                row,
                row < stop,
                track_slot,
                track_head,
                track_row,
                HEADS,
                GROUP,
                GROUP_BLOCK,
                CAPACITY,
                SUMS,
                SQUARES,
                SQUARES_LOGIT,
                SQUARES_LOGIT2,
                RAGGED,
            )


@triton.jit
def _accumulate(
    logits,
    sums,
    squares,
    squares_logit,
    squares_logit2,
    shift,
    total,
    slot,
    head,
    place,
    before,
    row,
    is_row,
    track_slot,
    track_head,
    track_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    SUMS: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_LOGIT: tl.constexpr,
    SQUARES_LOGIT2: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Update what a block of rows accumulates, from logits that were kept."""
    g = tl.arange(0, GROUP_BLOCK)
    is_head = g < GROUP
    entry = (slot * HEADS + head).to(tl.int64)
    at_logit = (entry * GROUP + g)[:, None] * CAPACITY + row[None, :]
    if RAGGED:
        of_slot = slot.to(tl.int64) * GROUP + g
        at_logit = of_slot[:, None] * (HEADS * CAPACITY) + before + row[None, :]
    x = tl.load(
        logits + at_logit,
        mask=is_head[:, None] & is_row[None, :],
        other=float("-inf"),
    )
    weights = tl.exp(x - shift[:, None]) / total[:, None]
    x = tl.where(x == float("-inf"), 0.0, x)  # 0 * -inf would be NaN
    at = row_start(slot, place, before + row, track_slot, track_head, track_row)
    if SUMS:
        _add(sums + at, weights, is_row)
    if SQUARES:
        _add(squares + at, weights * weights, is_row)
    if SQUARES_LOGIT:
        _add(squares_logit + at, weights * weights * x, is_row)
    if SQUARES_LOGIT2:
        _add(squares_logit2 + at, weights * weights * x * x, is_row)


@triton.jit
def _add(track, received, is_row):
    """Add what rows receive from the heads of a group to a track."""
    tl.store(track, tl.load(track, mask=is_row) + tl.sum(received, 0), mask=is_row)


def attend(
    layer: DecodeLayer,
    query: Tensor,
    *,
    scaling: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunks: int | None = None,
) -> Tensor:
    """Attention of one query per slot over the rows it holds and the one just stored.

    Rows that are not held are not read, nor are positions without a sliding window.

    Args:
        layer: The layer, of which only what accumulates changes; keys and values have equal
            strides, and so have the tracks that accumulate.
        query: After RoPE, ``[W, H_q, D]``.
        scaling: Factor on the logits.
        softcap: See `Decode`.
        sinks: See there.
        chunks: Chunks of a slab; ``None``: as many as keep the GPU busy.

    Returns:
        ``[W, H_q, D]`` in the precision of ``query``; zeros for slots that take no part.
    """
    keys, values, positions = layer.keys, layer.values, layer.positions
    accumulated, any_of_them = layer.accumulated_by_name, bool(layer.accumulators)
    rows, live = layer.rows, layer.live.view(torch.uint8)
    query = query if query.stride(-1) == 1 else query.contiguous()
    num_slots, num_heads, capacity, dim = keys.shape
    group = query.shape[1] // num_heads
    assert row_strides(keys) == row_strides(values), "keys and values lie alike"
    assert rows.stride(1) == 1, "the counts of one slot lie side by side"
    track_strides = {row_strides(track) for track in layer.accumulated} or {(0, 0, 0)}
    assert len(track_strides) == 1, "tracks that accumulate lie alike"
    # Tensor cores take 16-bit types; without them the product of query and keys fills registers.
    tensor_cores = query.dtype.itemsize == 2 and keys.dtype == query.dtype
    group_block, dim_block = blocks_of(group, dim, tensor_cores=tensor_cores)
    count, length = chunks_of(capacity, num_slots * num_heads, _processors(query.device), chunks)
    bounds = layer.bounds
    if bounds is not None:  # one head may have all rows of its slot
        count = -(-num_heads * capacity // length)
    out = query.new_empty(query.shape)
    chunk_top = chunk_total = chunk_output = out  # of one chunk nothing is kept
    if count > 1:
        parts = (num_slots, num_heads, count, group_block)
        chunk_top = query.new_empty(parts, dtype=torch.float32)
        chunk_total = torch.empty_like(chunk_top)
        chunk_output = query.new_empty((*parts, dim_block), dtype=torch.float32)
    logits = out
    if any_of_them:
        logits = query.new_empty((num_slots, num_heads, group, capacity), dtype=torch.float32)
    tracks = [accumulated.get(name, out) for name in ACCUMULATORS]
    ends = out if sinks is None else sinks, out, *tracks
    strides = *track_strides.pop(), rows.stride(0), 0 if bounds is None else bounds.stride(0)
    shape = {
        "HEADS": num_heads,
        "GROUP": group,
        "GROUP_BLOCK": group_block,
        "CAPACITY": capacity,
        "DIM": dim,
        "DIM_BLOCK": dim_block,
        "CHUNKS": count,
        "CHUNK": length,
        "BLOCK": BLOCK,
        "SINKS": sinks is not None,
        **{name.removeprefix("attn_").upper(): name in accumulated for name in ACCUMULATORS},
        "RAGGED": bounds is not None,
    }
    _attend_chunk[num_slots, num_heads, count](
        query,
        keys,
        values,
        positions,
        rows,
        layer.seq_len,
        live,
        rows if bounds is None else bounds,
        chunk_top,
        chunk_total,
        chunk_output,
        logits,
        *ends,
        scaling,
        *query.stride()[:2],
        *row_strides(keys),
        *row_strides(positions),
        *strides,
        SOFTCAP=softcap,
        SLIDING_WINDOW=layer.sliding_window,
        TENSOR_CORES=tensor_cores,
        **shape,
    )
    if count > 1:
        _join_chunks[num_slots, num_heads, count if any_of_them else 1](
            chunk_top,
            chunk_total,
            chunk_output,
            logits,
            *ends,
            rows,
            live,
            rows if bounds is None else bounds,
            *strides,
            **shape,
        )
    return out


def store_and_attend(
    layer: DecodeLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store one new row in every slot, and attend to the rows that it holds, see `Decode`.

    Slots that take no part get zeros.
    """
    if layer.slides:
        for slab in (layer.keys, layer.values, *layer.all_tracks):
            drop_oldest(slab, layer.rows, layer.live)
        drop_oldest(layer.positions, layer.rows, layer.live, fill=-1)
    append(layer, query, key, value, factor=window_factor(scaling, query.shape[2]))
    return attend(layer, query, scaling=scaling, softcap=softcap, sinks=sinks)


def blocks_of(group: int, dim: int, *, tensor_cores: bool) -> tuple[int, int]:
    """Rows and columns of the matrix that holds the queries of a group.

    Args:
        group: Query heads of a KV head.
        dim: Head size.
        tensor_cores: Whether tensor cores multiply it.
    """
    least = _TENSOR_CORE_SIZE if tensor_cores else 1
    return max(power_of_2(group), least), max(power_of_2(dim), least)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
