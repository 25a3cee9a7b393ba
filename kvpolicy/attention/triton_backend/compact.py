"""Rows that stay move to the front of their slabs, in place: compactions and sliding windows.

One program moves a block of columns of one KV head, block of rows after block of rows, so that no
program reads what another writes. Within a program a row moves to the front only: what a later
block reads lies behind everything that has been written. Between the reads and the writes of one
block all threads wait for each other. Rows of a prompt may lie beside their slab, in a staging area
that nothing is written to.

Slots are counted over everything that the first axis holds: the slabs of several layers, viewed as
``[layers * slots, H_kv, R, ...]``, are compacted by one call.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpolicy.devices import as_current
from kvpolicy.triton_common import power_of_2, row_start, row_strides

_BLOCK = 64  # rows moved at once
_COLUMNS = 32  # columns of one program: 64 bytes in 16-bit types


@triton.jit
def _move(slab, slot, head, source, target, columns, mask, slot_stride, head_stride, row_stride):
    """Copy a block of rows to the front, all reads before all writes."""
    source_at = row_start(slot, head, source, slot_stride, head_stride, row_stride)
    target_at = row_start(slot, head, target, slot_stride, head_stride, row_stride)
    moved = tl.load(slab + source_at[:, None] + columns[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(slab + target_at[:, None] + columns[None, :], moved, mask=mask)


# How many rows stay differs from compaction to compaction: no kernel is compiled anew for it.
@triton.jit(do_not_specialize=["most_kept", "capacity"])
def _compact(
    slab,
    keep,
    slots,
    num_kept,
    num_rows,
    start,
    beside,
    lanes,
    most_kept,
    capacity,
    slot_stride,
    head_stride,
    row_stride,
    beside_slot,
    beside_head,
    beside_row,
    STARTS: tl.constexpr,
    BESIDE: tl.constexpr,
    FILL: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + index)
    if slot >= 0:
        entry = (index * HEADS + head).to(tl.int64)
        kept = tl.load(num_kept + entry).to(tl.int32)
        held = tl.load(num_rows + entry).to(tl.int32)
        before = 0
        if STARTS:
            before = tl.load(start + index).to(tl.int32)
        lane = slot
        if BESIDE:
            lane = tl.load(lanes + index)
        for first in range(0, kept, BLOCK):
            target = first + tl.arange(0, BLOCK)
            source = tl.load(keep + entry * most_kept + target, mask=target < kept, other=0)
            mask = (target < kept)[:, None] & (columns < DIM)[None, :]
            if BESIDE:
                row = before + source - capacity
                at = row_start(lane, head, row, beside_slot, beside_head, beside_row)
                is_beside = mask & (row >= 0)[:, None]
                moved = tl.load(beside + at[:, None] + columns[None, :], mask=is_beside)
                at = row_start(slot, head, before + target, slot_stride, head_stride, row_stride)
                mask &= (row < 0)[:, None]
            _move(
                slab, slot, head, before + source, before + target, columns, mask,
                slot_stride, head_stride, row_stride,
            )  # fmt: skip
            if BESIDE:  # rows of a head rise: none of the slab is read once these are written
                tl.store(slab + at[:, None] + columns[None, :], moved, mask=is_beside)
        if BESIDE:
            held = tl.minimum(held, capacity - before)
        for first in range(kept, held, BLOCK):
            row = first + tl.arange(0, BLOCK)
            mask = (row < held)[:, None] & (columns < DIM)[None, :]
            at = row_start(slot, head, before + row, slot_stride, head_stride, row_stride)
            empty = tl.full((BLOCK, COLUMNS), FILL, tl.float32).to(slab.dtype.element_ty)
            tl.store(slab + at[:, None] + columns[None, :], empty, mask=mask)


def compact(
    slab: Tensor,
    keep: Tensor,
    slots: Tensor,
    num_kept: Tensor,
    num_rows: Tensor,
    fill: int = 0,
    *,
    start: Tensor | None = None,
    beside: Tensor | None = None,
    lanes: Tensor | None = None,
) -> None:
    """Make the kept rows the first ones of their slots and empty the rows behind them, in place.

    Args:
        slab: ``[S, H_kv, R]`` or ``[S, H_kv, R, D]``; several layers are folded into the first
            axis. Changed.
        keep: Rows that stay, rising, int64 ``[B, H_kv, K]``.
        slots: Entry of the first axis that each row of ``keep`` speaks of, ``[B]``; -1: none.
            No slot occurs twice.
        num_kept: How many entries of ``keep`` count, ``[B, H_kv]``.
        num_rows: Rows held before, ``[B, H_kv]``.
        fill: Value of empty rows.
        start: Rows before all of these that stay where they are, ``[B]``; ``None``: none.
        beside: Where the rows behind those of a slab lie, ``[N, H_kv, M]`` or ``[N, H_kv, M, D]``;
            it is left as it is. ``None``: there are none.
        lanes: Entry of the first axis of ``beside`` for each row of ``keep``, ``[B]``.
    """
    slab = _in_words(slab)
    area = slab if beside is None else _in_words(beside)
    keep, num_kept, num_rows = (each.contiguous() for each in (keep, num_kept, num_rows))
    dim = slab.shape[3] if slab.dim() == 4 else 1
    columns = min(_COLUMNS, power_of_2(dim))
    with as_current(slab.device):
        _compact[len(slots), slab.shape[1], triton.cdiv(dim, columns)](
            slab,
            keep,
            slots,
            num_kept,
            num_rows,
            slots if start is None else start,
            area,
            slots if lanes is None else lanes,
            keep.shape[2],
            slab.shape[2],
            *row_strides(slab),
            *row_strides(area),
            STARTS=start is not None,
            BESIDE=beside is not None,
            FILL=fill,
            HEADS=slab.shape[1],
            DIM=dim,
            COLUMNS=columns,
            BLOCK=_BLOCK,
        )


@triton.jit
def _drop_oldest(
    slab,
    rows,
    live,
    slot_stride,
    head_stride,
    row_stride,
    rows_slot,
    FILL: tl.constexpr,
    CAPACITY: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    full = tl.load(rows + slot * rows_slot + head) == CAPACITY
    if full & (tl.load(live + slot) != 0):
        for first in range(0, CAPACITY - 1, BLOCK):
            target = first + tl.arange(0, BLOCK)
            mask = (target < CAPACITY - 1)[:, None] & (columns < DIM)[None, :]
            _move(
                slab, slot, head, target + 1, target, columns, mask,
                slot_stride, head_stride, row_stride,
            )  # fmt: skip
        at = row_start(slot, head, CAPACITY - 1, slot_stride, head_stride, row_stride)
        empty = tl.full((COLUMNS,), FILL, tl.float32).to(slab.dtype.element_ty)
        tl.store(slab + at + columns, empty, mask=columns < DIM)


def drop_oldest(slab: Tensor, rows: Tensor, live: Tensor, fill: int = 0) -> None:
    """Drop the first row of every full slot and KV head, and empty the last one, in place.

    Args:
        slab: ``[W, H_kv, R]`` or ``[W, H_kv, R, D]``. Changed.
        rows: Rows held, ``[W, H_kv]``; those that hold ``R`` are full.
        live: Slots with a sequence, bool ``[W]``; the others stay as they are.
        fill: Value of empty rows.
    """
    slab = _in_words(slab)
    dim = slab.shape[3] if slab.dim() == 4 else 1
    columns = min(_COLUMNS, power_of_2(dim))
    _drop_oldest[*slab.shape[:2], triton.cdiv(dim, columns)](
        slab,
        rows,
        live.view(torch.uint8),
        *row_strides(slab),
        rows.stride(0),
        FILL=fill,
        CAPACITY=slab.shape[2],
        DIM=dim,
        COLUMNS=columns,
        BLOCK=_BLOCK,
    )


def _in_words(slab: Tensor) -> Tensor:
    """A slab of bytes as one of larger numbers, so that a thread moves more than a byte."""
    if slab.dtype != torch.uint8:
        return slab
    return slab.view(torch.int32 if slab.shape[3] % 4 == 0 else torch.int16)
