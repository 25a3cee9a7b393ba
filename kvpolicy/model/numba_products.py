"""Products of a few rows with weights in integers, in Numba: each weight is read once.

A decode step takes little more than reading the weights, and fewer bytes are read in less time.
Integers become fp32 in registers, and sums are in fp32.

Importing it needs the extra ``cpu``.
"""

import numpy as np
from numba import njit, prange

from kvpolicy.attention.numba_backend.lanes import (
    LANES,
    fetch,
    plus_product,
    read,
    read_signed,
    write_sums,
    zeros,
)
from kvpolicy.numba_common import FASTMATH, start_threads

start_threads()

_TILE = 16  # outputs that are one task

# Outputs that are computed at once, and rows: so many sums are in registers, and each number that
# is read is multiplied as often as it can be.
_GROUP = 4

# Outputs by which the processor is told of weights before they are multiplied. By itself it reads
# ahead while weights come from the memory, and stops while they are multiplied with more rows.
_AHEAD = 32
_LINE = 64  # bytes that are read at once


@njit(fastmath=FASTMATH, error_model="numpy")
def _dot(states, row, weights, n):
    """The product of one row with one row of weights."""
    total = np.float32(0)
    for k in range(weights.shape[1]):
        total += states[row, k] * np.float32(weights[n, k])
    return total


@njit(error_model="numpy")
def _four(states, row, weights, outputs, whole, sums):
    """Write the products of four rows with four rows of weights to ``sums``."""
    n, o, p, q = outputs
    a0 = b0 = c0 = d0 = a1 = b1 = c1 = d1 = zeros()
    a2 = b2 = c2 = d2 = a3 = b3 = c3 = d3 = zeros()
    for k in range(0, whole, LANES):
        a, b = read_signed(weights, n, k), read_signed(weights, o, k)
        c, d = read_signed(weights, p, k), read_signed(weights, q, k)
        own = read(states, row, k)
        a0, b0 = plus_product(a0, own, a), plus_product(b0, own, b)
        c0, d0 = plus_product(c0, own, c), plus_product(d0, own, d)
        own = read(states, row + 1, k)
        a1, b1 = plus_product(a1, own, a), plus_product(b1, own, b)
        c1, d1 = plus_product(c1, own, c), plus_product(d1, own, d)
        own = read(states, row + 2, k)
        a2, b2 = plus_product(a2, own, a), plus_product(b2, own, b)
        c2, d2 = plus_product(c2, own, c), plus_product(d2, own, d)
        own = read(states, row + 3, k)
        a3, b3 = plus_product(a3, own, a), plus_product(b3, own, b)
        c3, d3 = plus_product(c3, own, c), plus_product(d3, own, d)
    write_sums(sums, 0, 0, a0, b0, c0, d0)
    write_sums(sums, 1, 0, a1, b1, c1, d1)
    write_sums(sums, 2, 0, a2, b2, c2, d2)
    write_sums(sums, 3, 0, a3, b3, c3, d3)


@njit(parallel=True, cache=True, error_model="numpy")
def multiply(states, weights, scales, products):
    """Multiply rows with rounded weights.

    Args:
        states: Rows, ``[T, K]``.
        weights: Integers, ``[N, K]``.
        scales: What they are multiplied with, ``[N]``.
        products: Receives ``states @ (scales * weights).T``, ``[T, N]``.
    """
    num_rows, num_outputs = products.shape
    width = weights.shape[1]
    whole, last = width - width % LANES, num_outputs - 1
    together = num_rows - num_rows % _GROUP
    for tile in prange((num_outputs + _TILE - 1) // _TILE):
        sums = np.empty((_GROUP, _GROUP), np.float32)
        for n in range(tile * _TILE, min((tile + 1) * _TILE, num_outputs), _GROUP):
            # Behind the last output, it is computed again.
            outputs = n, min(n + 1, last), min(n + 2, last), min(n + 3, last)
            end = outputs[3] + 1
            for i in range(n + _AHEAD, n + _AHEAD + (_GROUP if together else 0)):
                for k in range(0, width, _LINE):
                    fetch(weights, i, k)
            for row in range(0, together, _GROUP):
                _four(states, row, weights, outputs, whole, sums)
                for i in range(_GROUP):
                    for m in range(n, end):
                        total = sums[i, m - n]
                        for k in range(whole, width):
                            total += states[row + i, k] * np.float32(weights[m, k])
                        products[row + i, m] = total * scales[m]
            for row in range(together, num_rows):
                for m in range(n, end):
                    products[row, m] = _dot(states, row, weights, m) * scales[m]
