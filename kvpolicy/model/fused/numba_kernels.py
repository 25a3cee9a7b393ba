"""Norms, rotations and gates in Numba, for decode steps in fp32: each number is read once.

What is computed is what `kvpolicy.model.fused.operators` computes, up to the order of sums and the
exponential function. Arrays are read past their last stride, which is 1. One thread computes: a
step has a few rows, and starting threads takes longer.

Importing it needs the extra ``cpu``.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from kvpolicy.attention.numba_backend.kept import kept
from kvpolicy.attention.numba_backend.lanes import (
    LANES,
    plus,
    plus_product,
    read,
    repeated,
    write,
    zeros,
)
from kvpolicy.numba_common import FASTMATH, exp

# One form of each function for all calls: compiling them takes seconds.
_ROWS, _HEADS, _OUT, _OUT_HEADS = "f4[:,:]", "f4[:,:,:]", "f4[:,::1]", "f4[:,:,::1]"
_NOTHING = np.empty((0, 0), dtype=np.float32)


@njit(fastmath=FASTMATH, error_model="numpy")
def _write_normed(states, row, weight, eps, out, to):
    """Write the norm of a row ``[M]`` to a row of an array."""
    size = weight.shape[1]
    whole = size - size % LANES
    sums = zeros()
    for i in range(0, whole, LANES):
        numbers = read(states, row, i)
        sums = plus_product(sums, numbers, numbers)
    lanes = np.empty((1, LANES), np.float32)
    write(lanes, 0, 0, sums)
    total = np.float32(0)
    for lane in range(LANES):
        total += lanes[0, lane]
    for i in range(whole, size):
        total += states[row, i] * states[row, i]
    inverse = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    factor = repeated(inverse)
    for i in range(0, whole, LANES):
        normed = plus_product(zeros(), read(states, row, i), factor)
        write(out, to, i, plus_product(zeros(), normed, read(weight, 0, i)))
    for i in range(whole, size):
        out[to, i] = states[row, i] * inverse * weight[0, i]


@kept(f"void({_ROWS}, {_ROWS}, f4, {_OUT})", fastmath=FASTMATH)
def _norm(states, weight, eps, out):
    for row in range(states.shape[0]):
        _write_normed(states, row, weight, eps, out, row)


@kept(
    f"void({_ROWS}, {_ROWS}, {_ROWS}, f4, {_OUT}, {_OUT})",
    fastmath=FASTMATH,
)
def _add_norm(states, added, weight, eps, total, out):
    size = weight.shape[1]
    whole = size - size % LANES
    for row in range(states.shape[0]):
        for i in range(0, whole, LANES):
            write(total, row, i, plus(read(states, row, i), read(added, row, i)))
        for i in range(whole, size):
            total[row, i] = states[row, i] + added[row, i]
        _write_normed(total, row, weight, eps, out, row)


@njit(fastmath=FASTMATH, error_model="numpy")
def _write_rotated(states, row, slot, cos, sin, out, to):
    """Write the rotated halves of a row ``[D]`` to a row of an array."""
    half = out.shape[1] // 2
    whole = half - half % LANES
    for i in range(0, whole, LANES):
        first, second = read(states, row, i), read(states, row, half + i)
        across = plus_product(zeros(), second, read(sin, slot, i))
        across = plus_product(zeros(), across, repeated(np.float32(-1)))
        write(out, to, i, plus_product(across, first, read(cos, slot, i)))
        across = plus_product(zeros(), first, read(sin, slot, half + i))
        write(out, to, half + i, plus_product(across, second, read(cos, slot, half + i)))
    for i in range(whole, half):
        first, second = states[row, i], states[row, half + i]
        out[to, i] = first * cos[slot, i] - second * sin[slot, i]
        out[to, half + i] = second * cos[slot, half + i] + first * sin[slot, half + i]


@kept(
    f"void({_HEADS}, {_HEADS}, {_ROWS}, {_ROWS}, {_ROWS}, {_ROWS}, f4, {_OUT_HEADS}, {_OUT_HEADS})",
    fastmath=FASTMATH,
)
def _rotate(query, key, cos, sin, query_weight, key_weight, eps, query_out, key_out):
    scratch = np.empty((1, query.shape[2]), np.float32)
    for slot in range(query.shape[0]):
        for states, weight, out in ((query, query_weight, query_out), (key, key_weight, key_out)):
            for head in range(states.shape[1]):
                if weight.shape[0]:
                    _write_normed(states[slot], head, weight, eps, scratch, 0)
                    _write_rotated(scratch, 0, slot, cos, sin, out[slot], head)
                else:
                    _write_rotated(states[slot], head, slot, cos, sin, out[slot], head)


@njit(fastmath=FASTMATH, error_model="numpy")
def _copy(states, row, numbers):
    """Copy a row to where the compiler knows that its numbers lie one behind another."""
    size = numbers.shape[1]
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        write(numbers, 0, i, read(states, row, i))
    for i in range(whole, size):
        numbers[0, i] = states[row, i]


@kept(f"void({_ROWS}, {_ROWS}, {_OUT})", fastmath=FASTMATH)
def _gate(gate, up, out):
    size = out.shape[1]
    numbers, factors = np.empty((1, size), np.float32), np.empty((1, size), np.float32)
    powers, shares = np.empty(size, np.int32), np.empty(size, np.float32)
    for row in range(out.shape[0]):
        _copy(gate, row, numbers)
        _copy(up, row, factors)
        for i in range(size):
            shares[i] = -numbers[0, i]
        exp(shares, np.float32(0), powers)
        for i in range(size):
            out[row, i] = numbers[0, i] / (np.float32(1) + shares[i]) * factors[0, i]


@intrinsic
def _pointer(typingctx, address):
    """A pointer to numbers."""

    def make(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.PointerType(ir.FloatType()))

    return types.CPointer(types.float32)(types.int64), make


@njit(error_model="numpy")
def _at(address, num_rows, stride):
    """Rows that begin at an address, one so many numbers behind another."""
    return carray(_pointer(address), (num_rows, stride))


@njit(error_model="numpy")
def _heads_at(address, num_slots, num_heads, dim, slot_stride, head_stride):
    """Heads that begin at an address, ``[W, H, D]``."""
    return as_strided(
        carray(_pointer(address), (num_slots, num_heads, dim)),
        (num_slots, num_heads, dim),
        (slot_stride * 4, head_stride * 4, 4),  # bytes
    )


@kept("void(i8, i8, i8, i8, i8, i8, f4)")
def norm_at(rows, size, states, stride, weight, out, eps):
    """The norm of rows of so many numbers, by addresses; ``stride``: numbers from row to row."""
    _norm(_at(states, rows, stride), _at(weight, 1, size), eps, _at(out, rows, size))


@kept("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, f4)")
def add_norm_at(rows, size, states, stride, added, added_stride, weight, total, out, eps):
    """The sum of rows, and its norm, by addresses."""
    _add_norm(
        _at(states, rows, stride),
        _at(added, rows, added_stride),
        _at(weight, 1, size),
        eps,
        _at(total, rows, size),
        _at(out, rows, size),
    )


@kept(f"void({', '.join(['i8'] * 18)}, f4)")
def rotate_at(
    slots,
    heads,
    key_heads,
    dim,
    query,
    query_slot,
    query_head,
    key,
    key_slot,
    key_head,
    cos,
    cos_slot,
    sin,
    sin_slot,
    query_weight,
    key_weight,
    query_out,
    key_out,
    eps,
):
    """The rotation of queries and keys, by addresses; without norms if their weights are at 0."""
    _rotate(
        _heads_at(query, slots, heads, dim, query_slot, query_head),
        _heads_at(key, slots, key_heads, dim, key_slot, key_head),
        _at(cos, slots, cos_slot),
        _at(sin, slots, sin_slot),
        _at(query_weight, 1 if query_weight else 0, dim),
        _at(key_weight, 1 if key_weight else 0, dim),
        eps,
        carray(_pointer(query_out), (slots, heads, dim)),
        carray(_pointer(key_out), (slots, key_heads, dim)),
    )


@kept("void(i8, i8, i8, i8, i8, i8, i8)")
def gate_at(rows, size, gate, gate_stride, up, up_stride, out):
    """``silu(gate) * up`` of rows, by addresses."""
    _gate(_at(gate, rows, gate_stride), _at(up, rows, up_stride), _at(out, rows, size))


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of states ``[..., M]``."""
    out = torch.empty(states.shape)
    _norm(_rows(states), _row(weight), eps, _rows(out))
    return out


def add_norm(states: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of states ``[..., M]``, and its norm."""
    total, out = torch.empty(states.shape), torch.empty(states.shape)
    _add_norm(_rows(states), _rows(added), _row(weight), eps, _rows(total), _rows(out))
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
    """Rotate queries ``[W, H_q, 1, D]`` and keys ``[W, H_kv, 1, D]``, see `operators.rotate`."""
    outs = torch.empty(query.shape), torch.empty(key.shape)
    _rotate(
        *(_array(one)[:, :, 0] for one in (query, key)),
        *(_array(one)[:, 0, 0] for one in (cos, sin)),
        *(_NOTHING if one is None else _row(one) for one in (query_weight, key_weight)),
        eps,
        *(one.numpy()[:, :, 0] for one in outs),
    )
    return outs


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, ``[..., N]``."""
    out = torch.empty(gate.shape)
    _gate(_rows(gate), _rows(up), _rows(out))
    return out


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor as an array whose numbers lie side by side along the last axis."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    array: np.ndarray = (tensor.detach() if tensor.requires_grad else tensor).numpy()
    return array


def _rows(states: Tensor) -> np.ndarray:
    """States ``[..., M]`` as rows ``[N, M]``."""
    array = _array(states)
    return array.reshape(-1, array.shape[-1])  # a copy of heads of a joint product only


def _row(weight: Tensor) -> np.ndarray:
    """A weight ``[M]`` as one row ``[1, M]``."""
    return _array(weight)[None]
