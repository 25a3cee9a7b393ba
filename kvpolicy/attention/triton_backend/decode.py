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
from kvpolicy.attention.chunks import DEFAULT_PROCESSORS, chunks_of
from kvpolicy.attention.triton_backend.append import append
from kvpolicy.attention.triton_backend.compact import drop_oldest
from kvpolicy.attention.triton_backend.rows import num_held, segment
from kvpolicy.attention.triton_backend.softmax import (
    add_to_track,
    capped,
    divisor_for,
    shift_for,
)
from kvpolicy.attention.triton_backend.stored_rows import (
    forms_of,
    put_exact,
    read_codes,
    read_rows,
    strides_of,
)
from kvpolicy.triton_common import (
    LEAST_OF_DOT,
    dot,
    power_of_2,
    row_start,
    row_strides,
    rows_at_once,
)

# Rows that are updated at once with what they accumulate.
_ACCUMULATED = 1024
_PARTS = 32  # chunks that are brought together at once


@triton.jit
def _attend_chunk(
    query,
    keys,
    values,
    exact_keys,
    exact_values,
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
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATED: tl.constexpr,
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
    EXACT: tl.constexpr = KEY_EXACT if KEY_EXACT > VALUE_EXACT else VALUE_EXACT
    KEEP_LOGITS: tl.constexpr = SUMS or SQUARES or SQUARES_LOGIT or SQUARES_LOGIT2
    # Rows whose integers are multiplied as they are, and the products scaled.
    KEY_CODES: tl.constexpr = TENSOR_CORES and KEY_BITS == 8 and KEY_EXACT == 0
    VALUE_CODES: tl.constexpr = TENSOR_CORES and VALUE_BITS == 8 and VALUE_EXACT == 0
    slot, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    held = num_held(rows, slot, head, live, rows_slot, CAPACITY)
    place, before = head, 0  # the head of a row in the slab, and the rows there before its first
    if RAGGED:
        place = 0
        before, held = segment(bounds, slot, head, bounds_slot, held, CAPACITY)
    g, d = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    v_d = tl.arange(0, VALUE_DIM_BLOCK)
    is_head, is_dim = g < GROUP, d < DIM
    entry = (slot * HEADS + head).to(tl.int64)
    part = (entry * CHUNKS + chunk) * GROUP_BLOCK + g
    start = chunk * CHUNK
    stop = tl.minimum(start + CHUNK, held)
    top = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    output = tl.zeros((GROUP_BLOCK, VALUE_DIM_BLOCK), tl.float32)
    if start < stop:
        query_at = slot.to(tl.int64) * query_slot + (head * GROUP + g) * query_head
        q = tl.load(
            query + query_at[:, None] + d[None, :],
            mask=is_head[:, None] & is_dim[None, :],
            other=0.0,
        )
        kind: tl.constexpr = query.dtype.element_ty  # of numbers that integers stand for
        if not TENSOR_CORES:
            q = q.to(tl.float32)
        if KEY_CODES:
            query_sum = tl.sum(q.to(tl.float32), 1)
        if SLIDING_WINDOW > 0:
            oldest = tl.load(seq_len + slot) - SLIDING_WINDOW
        if EXACT > 0:
            oldest_exact = tl.load(seq_len + slot) - EXACT
            key_ring = exact_keys + slot.to(tl.int64) * exact_keys_slot + head * EXACT * DIM
            value_ring = exact_values + slot.to(tl.int64) * exact_values_slot
            value_ring += head * EXACT * VALUE_DIM
        for first in range(start, stop, BLOCK):
            row = first + tl.arange(0, BLOCK)
            is_row = row < stop
            seen = is_row
            if SLIDING_WINDOW > 0:
                at = row_start(
                    slot, place, before + row, position_slot, position_head, position_row
                )
                seen = seen & (tl.load(positions + at, mask=is_row, other=-1) > oldest)
            at = row_start(slot, place, before + row, keys_slot, keys_head, keys_row) * KEY_UNIT
            if KEY_CODES:
                k, step, middle = read_codes(keys, at, is_row, kind, DIM, DIM_BLOCK, KEY_UNIT)
            else:
                k = read_rows(keys, at, is_row, kind, DIM, DIM_BLOCK, KEY_BITS, KEY_SIZE, KEY_UNIT)
            if EXACT > 0:  # positions rise, so that they are among the last rows
                is_near = is_row & (row >= held - EXACT)
                at = row_start(
                    slot, place, before + row, position_slot, position_head, position_row
                )
                position = tl.load(positions + at, mask=is_near, other=-1)
                is_near = is_near & (position > oldest_exact)
                k = put_exact(k, key_ring, position, is_near, DIM, DIM_BLOCK, KEY_EXACT)
            x = dot(q, tl.trans(k if TENSOR_CORES else k.to(tl.float32)))
            if KEY_CODES:
                x = x * step[None, :] + query_sum[:, None] * middle[None, :]
            x = x * scaling
            x = capped(x, SOFTCAP)
            x = tl.where(seen[None, :], x, float("-inf"))
            if KEEP_LOGITS:
                at_logit = (entry * GROUP + g)[:, None] * CAPACITY + row[None, :]
                if RAGGED:  # in the place of the row, in the pool of each head of a group
                    of_slot = slot.to(tl.int64) * GROUP + g
                    at_logit = of_slot[:, None] * (HEADS * CAPACITY) + before + row[None, :]
                tl.store(logits + at_logit, x, mask=is_head[:, None] & is_row[None, :])
            new_top = tl.maximum(top, tl.max(x, 1))
            shift = shift_for(new_top)  # -inf as long as no row is seen
            p = tl.exp(x - shift[:, None])
            fade = tl.exp(top - shift)
            total = total * fade + tl.sum(p, 1)
            at = row_start(slot, place, before + row, values_slot, values_head, values_row)
            at *= VALUE_UNIT
            if VALUE_CODES:
                v, step, middle = read_codes(
                    values, at, is_row, kind, VALUE_DIM, VALUE_DIM_BLOCK, VALUE_UNIT
                )
            else:
                v = read_rows(
                    values, at, is_row, kind,
                    VALUE_DIM, VALUE_DIM_BLOCK, VALUE_BITS, VALUE_SIZE, VALUE_UNIT,
                )  # fmt: skip
            if EXACT > 0:
                v = put_exact(
                    v, value_ring, position, is_near, VALUE_DIM, VALUE_DIM_BLOCK, VALUE_EXACT
                )
            if VALUE_CODES:
                of_middles = tl.sum(p * middle[None, :], 1)
                added = dot((p * step[None, :]).to(v.dtype), v) + of_middles[:, None]
            elif TENSOR_CORES:
                added = dot(p.to(v.dtype), v)
            else:
                added = dot(p, v.to(tl.float32))
            output = output * fade[:, None] + added
            top = new_top
        if CHUNKS > 1:
            tl.store(chunk_output + part[:, None] * VALUE_DIM_BLOCK + v_d[None, :], output)
    if CHUNKS > 1:
        tl.store(chunk_top + part, top)
        tl.store(chunk_total + part, total)
    else:
        sink = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
        if SINKS:
            sink = tl.load(sinks + head * GROUP + g, mask=is_head, other=float("-inf"))
            sink = sink.to(tl.float32)
        shift = shift_for(tl.maximum(top, sink))
        fade = tl.exp(top - shift)
        total = divisor_for(tl.exp(sink - shift) + total * fade)
        at = ((entry * GROUP + g) * VALUE_DIM)[:, None] + v_d[None, :]
        output = (output * (fade / total)[:, None]).to(out.dtype.element_ty)
        tl.store(out + at, output, mask=is_head[:, None] & (v_d < VALUE_DIM)[None, :])
        if KEEP_LOGITS:
            tl.debug_barrier()  # other threads have stored the logits
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
                start,
                stop,
                track_slot,
                track_head,
                track_row,
                HEADS,
                GROUP,
                GROUP_BLOCK,
                CAPACITY,
                ACCUMULATED,
                SUMS,
                SQUARES,
                SQUARES_LOGIT,
                SQUARES_LOGIT2,
                RAGGED,
            )


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
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATED: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    SUMS: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_LOGIT: tl.constexpr,
    SQUARES_LOGIT2: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Program i brings the output of query head i of a group together, and updates chunk i.

    Chunks are read many at a time: one after the other, each would wait for memory.
    """
    slot, head, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    held = num_held(rows, slot, head, live, rows_slot, CAPACITY)
    place, before = head, 0  # the head of a row in the slab, and the rows there before its first
    if RAGGED:
        place = 0
        before, held = segment(bounds, slot, head, bounds_slot, held, CAPACITY)
    g, d = tl.arange(0, GROUP_BLOCK), tl.arange(0, VALUE_DIM_BLOCK)
    is_head, is_dim = g < GROUP, d < VALUE_DIM
    entry = (slot * HEADS + head).to(tl.int64)
    num_chunks = CHUNKS
    if RAGGED:  # there may be many more than those of a head
        num_chunks = tl.cdiv(held, CHUNK)
    top = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    for first in range(0, num_chunks, PARTS):
        tops = _of_chunks(chunk_top, entry, first, num_chunks, float("-inf"), CHUNKS, g, PARTS)
        top = tl.maximum(top, tl.max(tops, 0))
    sink = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + g, mask=is_head, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, sink)
    shift = shift_for(top)
    total = tl.exp(sink - shift)
    for first in range(0, num_chunks, PARTS):
        tops = _of_chunks(chunk_top, entry, first, num_chunks, float("-inf"), CHUNKS, g, PARTS)
        totals = _of_chunks(chunk_total, entry, first, num_chunks, 0.0, CHUNKS, g, PARTS)
        total += tl.sum(totals * tl.exp(tops - shift[None, :]), 0)
    total = divisor_for(total)
    if i < GROUP:
        its_shift = tl.sum(tl.where(g == i, shift, 0.0), 0)
        its_total = tl.sum(tl.where(g == i, total, 0.0), 0)
        output = tl.zeros((VALUE_DIM_BLOCK,), tl.float32)
        for first in range(0, num_chunks, PARTS):
            c = first + tl.arange(0, PARTS)
            has_rows = (c < num_chunks) & (c * CHUNK < held)  # others have stored no output
            part = (entry * CHUNKS + c) * GROUP_BLOCK + i
            tops = tl.load(chunk_top + part, mask=has_rows, other=float("-inf"))
            of_chunks = tl.load(
                chunk_output + part[:, None] * VALUE_DIM_BLOCK + d[None, :],
                mask=has_rows[:, None],
                other=0.0,
            )
            output += tl.sum(of_chunks * tl.exp(tops - its_shift)[:, None], 0)
        at = (entry * GROUP + i) * VALUE_DIM + d
        tl.store(out + at, (output / its_total).to(out.dtype.element_ty), mask=is_dim)
    if SUMS or SQUARES or SQUARES_LOGIT or SQUARES_LOGIT2:
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
            i * CHUNK,
            tl.minimum((i + 1) * CHUNK, held),
            track_slot,
            track_head,
            track_row,
            HEADS,
            GROUP,
            GROUP_BLOCK,
            CAPACITY,
            ACCUMULATED,
            SUMS,
            SQUARES,
            SQUARES_LOGIT,
            SQUARES_LOGIT2,
            RAGGED,
        )


@triton.jit
def _of_chunks(
    numbers, entry, first, num_chunks, other, CHUNKS: tl.constexpr, g, PARTS: tl.constexpr
):
    """What some chunks have kept of each query head of a group, ``[PARTS, GROUP_BLOCK]``."""
    c = first + tl.arange(0, PARTS)
    part = ((entry * CHUNKS + c) * g.shape[0])[:, None] + g[None, :]
    return tl.load(numbers + part, mask=(c < num_chunks)[:, None], other=other)


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
    start,
    stop,
    track_slot,
    track_head,
    track_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,
    SUMS: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_LOGIT: tl.constexpr,
    SQUARES_LOGIT2: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Update what rows accumulate, from logits that were kept.

    Many rows at a time and one query head after the other: a program waits for memory a few times,
    and not once for each block that it attends to.
    """
    g = tl.arange(0, GROUP_BLOCK)
    entry = (slot * HEADS + head).to(tl.int64)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < stop
        received = tl.zeros((ROWS,), tl.float32)
        of_squares = tl.zeros((ROWS,), tl.float32)
        of_logit = tl.zeros((ROWS,), tl.float32)
        of_logit2 = tl.zeros((ROWS,), tl.float32)
        for i in tl.static_range(GROUP):
            its_shift = tl.sum(tl.where(g == i, shift, 0.0), 0)
            its_total = tl.sum(tl.where(g == i, total, 0.0), 0)
            at = (entry * GROUP + i) * CAPACITY + row
            if RAGGED:
                at = (slot.to(tl.int64) * GROUP + i) * (HEADS * CAPACITY) + before + row
            x = tl.load(logits + at, mask=is_row, other=float("-inf"))
            weight = tl.exp(x - its_shift) / its_total
            x = tl.where(x == float("-inf"), 0.0, x)  # 0 * -inf would be NaN
            received += weight
            of_squares += weight * weight
            of_logit += weight * weight * x
            of_logit2 += weight * weight * x * x
        at = row_start(slot, place, before + row, track_slot, track_head, track_row)
        if SUMS:
            add_to_track(sums + at, received, is_row)
        if SQUARES:
            add_to_track(squares + at, of_squares, is_row)
        if SQUARES_LOGIT:
            add_to_track(squares_logit + at, of_logit, is_row)
        if SQUARES_LOGIT2:
            add_to_track(squares_logit2 + at, of_logit2, is_row)


def attend(
    layer: DecodeLayer,
    query: Tensor,
    *,
    value_dim: int,
    scaling: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunks: int | None = None,
) -> Tensor:
    """Attention of one query per slot over the rows it holds and the one just stored.

    Rows that are not held are not read, nor are positions without a sliding window.

    Args:
        layer: The layer, of which only what accumulates changes; the tracks that accumulate have
            equal strides.
        query: After RoPE, ``[W, H_q, D]``.
        value_dim: Size of a head of values, ``V``.
        scaling: Factor on the logits.
        softcap: See `Decode`.
        sinks: See there.
        chunks: Chunks of a slab; ``None``: as many as keep the GPU busy.

    Returns:
        ``[W, H_q, V]`` in the precision of ``query``; zeros for slots that take no part.
    """
    keys, positions = layer.keys, layer.positions
    accumulated, any_of_them = layer.accumulated_by_name, bool(layer.accumulators)
    rows, live = layer.rows, layer.live.view(torch.uint8)
    query = query if query.stride(-1) == 1 else query.contiguous()
    (num_slots, num_heads, capacity), dim = keys.shape[:3], query.shape[2]
    group = query.shape[1] // num_heads
    assert rows.stride(1) == 1, "the counts of one slot lie side by side"
    track_strides = {row_strides(track) for track in layer.accumulated} or {(0, 0, 0)}
    assert len(track_strides) == 1, "tracks that accumulate lie alike"
    # Tensor cores take 16-bit types; others are multiplied in fp32.
    # Integers become numbers of the type of queries.
    kinds = {query.dtype, *(one.dtype for one, bits in _sides(layer) if not bits)}
    tensor_cores = query.dtype.itemsize == 2 and len(kinds) == 1
    group_block = max(power_of_2(group), LEAST_OF_DOT)
    forms = forms_of(layer, dim, value_dim, LEAST_OF_DOT)
    block = rows_at_once(max(dim, value_dim), 2 if tensor_cores else 4)
    if 4 in (layer.key_bits, layer.value_bits):  # as numbers they fill registers
        block = max(block // 2, LEAST_OF_DOT)
    count, length = chunks_of(capacity, num_slots * num_heads, _processors(query.device), chunks)
    bounds = layer.bounds
    if bounds is not None:  # one head may have all rows of its slot
        count = -(-num_heads * capacity // length)
    out = query.new_empty(*query.shape[:2], value_dim)
    chunk_top = chunk_total = chunk_output = out  # of one chunk nothing is kept
    if count > 1:
        parts = (num_slots, num_heads, count, group_block)
        chunk_top = query.new_empty(parts, dtype=torch.float32)
        chunk_total = torch.empty_like(chunk_top)
        chunk_output = query.new_empty((*parts, forms["VALUE_DIM_BLOCK"]), dtype=torch.float32)
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
        "CHUNKS": count,
        "CHUNK": length,
        "BLOCK": block,
        "ACCUMULATED": min(power_of_2(length), _ACCUMULATED),
        "SINKS": sinks is not None,
        **{name.removeprefix("attn_").upper(): name in accumulated for name in ACCUMULATORS},
        "RAGGED": bounds is not None,
    }
    _attend_chunk[num_slots, num_heads, count](
        query,
        keys,
        layer.values,
        out if layer.exact_keys is None else layer.exact_keys,
        out if layer.exact_values is None else layer.exact_values,
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
        *strides_of(layer),
        *row_strides(positions),
        *strides,
        SOFTCAP=softcap,
        SLIDING_WINDOW=layer.sliding_window,
        TENSOR_CORES=tensor_cores,
        **forms,
        **shape,
    )
    if count > 1:
        programs = max(group, count if any_of_them else 1)
        _join_chunks[num_slots, num_heads, programs](
            chunk_top,
            chunk_total,
            chunk_output,
            logits,
            *ends,
            rows,
            live,
            rows if bounds is None else bounds,
            *strides,
            VALUE_DIM=value_dim,
            VALUE_DIM_BLOCK=forms["VALUE_DIM_BLOCK"],
            PARTS=min(power_of_2(count), _PARTS),
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
    return attend(
        layer, query, value_dim=value.shape[2], scaling=scaling, softcap=softcap, sinks=sinks
    )


def _sides(layer: DecodeLayer) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """Keys and values, each with the bits of their integers."""
    return (layer.keys, layer.key_bits), (layer.values, layer.value_bits)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
