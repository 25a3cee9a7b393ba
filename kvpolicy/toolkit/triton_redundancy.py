"""Redundancy among keys, for GPUs: R-KV's similarities without a tensor of T x T numbers.

The similarities of row j to all rows sum to ``u_j . (u_1 + ... + u_T - u_j)``, with ``u`` the keys
at length 1. Products of all pairs are needed only to find which row each row does not make
redundant; they stay in registers. No atomics: the same input gives the same bits.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpolicy.triton_common import (
    LEAST_OF_DOT,
    dot,
    power_of_2,
    row_start,
    row_strides,
    rows_at_once,
)

_EPSILON = 1e-8  # added to norms, as by the authors


@triton.jit
def _load_keys(
    keys, batch, head, row, d, num_rows, slot_stride, head_stride, row_stride, DIM: tl.constexpr
):
    at = row_start(batch, head, row, slot_stride, head_stride, row_stride)
    mask = (row < num_rows)[:, None] & (d < DIM)[None, :]
    return tl.load(keys + at[:, None] + d[None, :], mask=mask, other=0.0)


# Prompts have any number of rows: no kernel is compiled anew for it.
@triton.jit(do_not_specialize=["capacity"])
def _units(
    keys,
    num_rows,
    inverse_norms,
    unit_sums,
    slot_stride,
    head_stride,
    row_stride,
    capacity,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """1 / length of each key, and the sum of the keys at length 1, of one KV head."""
    batch, head = tl.program_id(0), tl.program_id(1)
    entry = (batch * HEADS + head).to(tl.int64)
    held = tl.load(num_rows + entry).to(tl.int32)
    d = tl.arange(0, DIM_BLOCK)
    total = tl.zeros((DIM_BLOCK,), tl.float32)
    for first in range(0, held, BLOCK):
        row = first + tl.arange(0, BLOCK)
        k = _load_keys(
            keys, batch, head, row, d, held, slot_stride, head_stride, row_stride, DIM
        ).to(tl.float32)
        inverse = 1 / (tl.sqrt(tl.sum(k * k, 1)) + EPSILON)
        tl.store(inverse_norms + entry * capacity + row, inverse, mask=row < held)
        total += tl.sum(k * inverse[:, None], 0)
    tl.store(unit_sums + entry * DIM_BLOCK + d, total)


@triton.jit(do_not_specialize=["capacity"])
def _exempt_pairs(
    keys,
    num_rows,
    inverse_norms,
    exempt,
    similarity,
    threshold,
    slot_stride,
    head_stride,
    row_stride,
    capacity,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
):
    """For a block of rows, the row that each does not make redundant, and their similarity."""
    batch, head = tl.program_id(0), tl.program_id(1)
    entry = (batch * HEADS + head).to(tl.int64)
    held = tl.load(num_rows + entry).to(tl.int32)
    d = tl.arange(0, DIM_BLOCK)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k_i = _load_keys(keys, batch, head, i, d, held, slot_stride, head_stride, row_stride, DIM)
    inverse_i = tl.load(inverse_norms + entry * capacity + i, mask=i < held, other=0.0)
    # Row 0 stands for none: the authors take the maximum of indices and zeros.
    last = tl.zeros((BLOCK,), tl.int32)
    found = tl.zeros((BLOCK,), tl.float32)
    stop = held
    if FIRST:
        stop = tl.minimum(held, 1)
    for first in range(0, stop, BLOCK):
        j = first + tl.arange(0, BLOCK)
        k_j = _load_keys(keys, batch, head, j, d, held, slot_stride, head_stride, row_stride, DIM)
        inverse_j = tl.load(inverse_norms + entry * capacity + j, mask=j < held, other=0.0)
        product = dot(k_i, tl.trans(k_j)) * inverse_i[:, None] * inverse_j[None, :]
        product = tl.where(i[:, None] == j[None, :], 0.0, product)
        taken = tl.zeros((BLOCK,), tl.int32)
        if not FIRST:
            similar = (product > threshold) & (j < held)[None, :]
            taken = tl.max(tl.where(similar, j[None, :], 0), 1)
        here = tl.sum(tl.where(j[None, :] == taken[:, None], product, 0.0), 1)
        # The first block also says how similar row 0 is.
        newer = (taken > last) | (first == 0)
        found = tl.where(newer, here, found)
        last = tl.where(newer, taken, last)
    tl.store(exempt + entry * capacity + i, last, mask=i < held)
    tl.store(similarity + entry * capacity + i, found, mask=i < held)


@triton.jit(do_not_specialize=["capacity"])
def _totals(
    keys,
    num_rows,
    inverse_norms,
    unit_sums,
    exempt,
    similarity,
    totals,
    slot_stride,
    head_stride,
    row_stride,
    capacity,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For a block of rows, the sum of their similarities without exempt pairs; -inf if empty."""
    batch, head = tl.program_id(0), tl.program_id(1)
    entry = (batch * HEADS + head).to(tl.int64)
    held = tl.load(num_rows + entry).to(tl.int32)
    d = tl.arange(0, DIM_BLOCK)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k = _load_keys(keys, batch, head, j, d, held, slot_stride, head_stride, row_stride, DIM)
    inverse = tl.load(inverse_norms + entry * capacity + j, mask=j < held, other=0.0)
    unit = k.to(tl.float32) * inverse[:, None]
    others = tl.load(unit_sums + entry * DIM_BLOCK + d)[None, :] - unit
    total = tl.sum(unit * others, 1)
    for first in range(0, held, BLOCK):
        i = first + tl.arange(0, BLOCK)
        column = tl.load(exempt + entry * capacity + i, mask=i < held, other=-1)
        found = tl.load(similarity + entry * capacity + i, mask=i < held, other=0.0)
        total -= tl.sum(tl.where(column[:, None] == j[None, :], found[:, None], 0.0), 0)
    mean = tl.where(j < held, total / held, float("-inf"))
    tl.store(totals + entry * capacity + j, mean, mask=j < capacity)


def key_redundancy(
    keys: Tensor,
    *,
    threshold: float,
    retain: Literal["last", "first"] = "last",
    num_rows: Tensor | None = None,
) -> Tensor:
    """Softmax over rows of each row's mean cosine similarity to the others.

    R-KV, eqs. 5-7; ``cal_similarity`` at Zefan-Cai/R-KV d15c976.

    Args:
        keys: Keys after RoPE, ``[B, H_kv, T, D]``, with any strides but that of ``D``.
        threshold: Cosine similarity above which two keys count as similar.
        retain: Which similar row a row does not make redundant: ``"last"``, the newest, or
            ``"first"``, which in the authors' code means the first row of the cache.
        num_rows: Rows that count, from the first on and at least 1, ``[B, H_kv]``; ``None``: all.

    Returns:
        ``[B, H_kv, T]``, fp32, sums to 1 over the rows; 0 for rows that do not count.
    """
    batch, num_heads, capacity, dim = keys.shape
    counts = keys.new_zeros((batch, num_heads), dtype=torch.int64)
    counts = counts + capacity if num_rows is None else counts + num_rows
    dim_block = power_of_2(max(dim, LEAST_OF_DOT))
    per_row = (batch, num_heads, capacity)
    inverse_norms = keys.new_empty(per_row, dtype=torch.float32)
    unit_sums = keys.new_empty((batch, num_heads, dim_block), dtype=torch.float32)
    exempt = keys.new_empty(per_row, dtype=torch.int32)
    similarity, totals = torch.empty_like(inverse_norms), torch.empty_like(inverse_norms)
    given = *row_strides(keys), capacity
    block = rows_at_once(dim, keys.dtype.itemsize)
    shape = {"HEADS": num_heads, "DIM": dim, "DIM_BLOCK": dim_block, "BLOCK": block}
    blocks = (batch, num_heads, triton.cdiv(capacity, block))
    _units[batch, num_heads](
        keys, counts, inverse_norms, unit_sums, *given, EPSILON=_EPSILON, **shape
    )
    _exempt_pairs[blocks](
        keys,
        counts,
        inverse_norms,
        exempt,
        similarity,
        threshold,
        *given,
        FIRST=retain == "first",
        **shape,
    )
    _totals[blocks](
        keys, counts, inverse_norms, unit_sums, exempt, similarity, totals, *given, **shape
    )
    return totals.softmax(dim=-1)
