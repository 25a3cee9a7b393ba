"""Norms, rotations and gates in Triton: one program for each row or head of a token.

What is computed is what `kvpolicy.model.fused.operators` computes, rounded at the same places. All
numbers of a row are held at once, which is why `operators.LONGEST_ROW` is the longest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpolicy.triton_common import power_of_2, rounded

_GATE_BLOCK = 1024
_NUMBERS_PER_WARP = 512


@triton.jit
def _norm(
    states,
    added,
    weight,
    total,
    out,
    eps,
    states_row,
    added_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = out.dtype.element_ty
    i = tl.arange(0, BLOCK)
    ok = i < SIZE
    x = tl.load(states + row * states_row + i, mask=ok, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(added + row * added_row + i, mask=ok, other=0.0).to(tl.float32)
        x = rounded(x, kind)
        tl.store(total + row * SIZE + i, x.to(kind), mask=ok)
    inverse = 1 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    x = rounded(x * inverse, kind)
    x = rounded(x * tl.load(weight + i, mask=ok, other=0.0).to(tl.float32), kind)
    tl.store(out + row * SIZE + i, x.to(kind), mask=ok)


@triton.jit
def _rotated(
    states,
    weight,
    cos,
    sin,
    out,
    eps,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotate the halves of one head."""
    half: tl.constexpr = DIM // 2
    kind: tl.constexpr = out.dtype.element_ty
    i = tl.arange(0, HALF_BLOCK)
    ok = i < half
    first = tl.load(states + i, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(states + half + i, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
        inverse = 1 / tl.sqrt(squares / DIM + eps)
        first, second = rounded(first * inverse, kind), rounded(second * inverse, kind)
        first *= tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
        second *= tl.load(weight + half + i, mask=ok, other=0.0).to(tl.float32)
        first, second = rounded(first, kind), rounded(second, kind)
    along = rounded(first * tl.load(cos + i, mask=ok, other=0.0).to(tl.float32), kind)
    across = rounded(second * tl.load(sin + i, mask=ok, other=0.0).to(tl.float32), kind)
    tl.store(out + i, rounded(along - across, kind).to(kind), mask=ok)
    along = rounded(second * tl.load(cos + half + i, mask=ok, other=0.0).to(tl.float32), kind)
    across = rounded(first * tl.load(sin + half + i, mask=ok, other=0.0).to(tl.float32), kind)
    tl.store(out + half + i, rounded(along + across, kind).to(kind), mask=ok)


# A step has one token, prompts have any number: no kernel is compiled anew for it.
@triton.jit(do_not_specialize_on_alignment=["length"])
def _rotate(
    query,
    key,
    cos,
    sin,
    query_weight,
    key_weight,
    query_out,
    key_out,
    eps,
    length,
    query_slot,
    query_head,
    query_token,
    key_slot,
    key_head,
    key_token,
    cos_slot,
    cos_token,
    sin_slot,
    sin_token,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    slot, token = (row // length).to(tl.int64), (row % length).to(tl.int64)
    cos += slot * cos_slot + token * cos_token
    sin += slot * sin_slot + token * sin_token
    if head < QUERY_HEADS:
        at = query + slot * query_slot + head * query_head + token * query_token
        to = query_out + ((slot * QUERY_HEADS + head) * length + token) * DIM
        _rotated(at, query_weight, cos, sin, to, eps, DIM, HALF_BLOCK, NORM)
    else:
        head -= QUERY_HEADS
        at = key + slot * key_slot + head * key_head + token * key_token
        to = key_out + ((slot * KEY_HEADS + head) * length + token) * DIM
        _rotated(at, key_weight, cos, sin, to, eps, DIM, HALF_BLOCK, NORM)


@triton.jit
def _gate(gate, up, out, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < SIZE
    kind: tl.constexpr = out.dtype.element_ty
    x = tl.load(gate + row * gate_row + i, mask=ok, other=0.0).to(tl.float32)
    x = rounded(x / (1 + tl.exp(-x)), kind)
    x = rounded(x * tl.load(up + row * up_row + i, mask=ok, other=0.0).to(tl.float32), kind)
    tl.store(out + row * SIZE + i, x.to(kind), mask=ok)


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of states ``[..., M]``."""
    return _normed(states, None, weight, eps)[1]


def add_norm(states: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of states ``[..., M]``, and its norm."""
    return _normed(states, added, weight, eps)


def _normed(
    states: Tensor, added: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Sum, if something is added, and norm."""
    rows = _rows(states)
    more = rows if added is None else _rows(added)
    size = rows.shape[1]
    out = states.new_empty(states.shape)
    total = out if added is None else torch.empty_like(out)
    block = power_of_2(size)
    _norm[len(rows),](
        rows,
        more,
        weight,
        total,
        out,
        eps,
        rows.stride(0),
        more.stride(0),
        SIZE=size,
        BLOCK=block,
        ADDS=added is not None,
        num_warps=_warps(block),
    )
    return total, out


def rotate(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Rotate queries ``[W, H_q, L, D]`` and keys ``[W, H_kv, L, D]``, see `operators.rotate`."""
    query, key, cos, sin = (
        one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, cos, sin)
    )
    slots, query_heads, length, dim = query.shape
    key_heads = key.shape[1]
    outs = query.new_empty(query.shape), key.new_empty(key.shape)
    _rotate[slots * length, query_heads + key_heads](
        query,
        key,
        cos,
        sin,
        query if query_weight is None else query_weight,
        key if key_weight is None else key_weight,
        *outs,
        eps,
        length,
        *query.stride()[:3],
        *key.stride()[:3],
        *cos.stride()[::2],
        *sin.stride()[::2],
        QUERY_HEADS=query_heads,
        KEY_HEADS=key_heads,
        DIM=dim,
        HALF_BLOCK=power_of_2(dim // 2),
        NORM=query_weight is not None,
        num_warps=1,
        # Each product is rounded, as a model rounds it: keys of a step equal those of a prompt.
        enable_fp_fusion=False,
    )
    return outs


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, ``[..., N]``."""
    rows, more = _rows(gate), _rows(up)
    out = gate.new_empty(gate.shape)
    size = rows.shape[1]
    _gate[len(rows), triton.cdiv(size, _GATE_BLOCK)](
        rows,
        more,
        out,
        rows.stride(0),
        more.stride(0),
        SIZE=size,
        BLOCK=_GATE_BLOCK,
        num_warps=4,
    )
    return out


def _rows(states: Tensor) -> Tensor:
    """States ``[..., M]`` as rows ``[N, M]`` whose numbers lie side by side."""
    rows = states.flatten(0, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _warps(block: int) -> int:
    return min(max(block // _NUMBERS_PER_WARP, 1), 16)
