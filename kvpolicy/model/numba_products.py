"""Products of a few rows with weights in integers, in Numba: each weight is read once.

A decode step takes little more than reading the weights, and fewer bytes are read in less time.
Integers become fp32 in registers, and sums are in fp32.

Importing it needs the extra ``cpu``.
"""

import numpy as np
from numba import njit, prange

from kvpolicy.numba_common import FASTMATH, start_threads

start_threads()

_TILE = 16  # rows of weights that are one task


@njit(fastmath=FASTMATH, error_model="numpy")
def _dot(states, row, weights, n):
    """The product of one row with one row of weights."""
    total = np.float32(0)
    for k in range(weights.shape[1]):
        total += states[row, k] * np.float32(weights[n, k])
    return total


@njit(fastmath=FASTMATH, error_model="numpy")
def _dots(states, row, weights, n, m):
    """The products of four rows with two rows of weights, which are in registers meanwhile."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    for k in range(weights.shape[1]):
        a, b = np.float32(weights[n, k]), np.float32(weights[m, k])
        s0, s1 = states[row, k], states[row + 1, k]
        s2, s3 = states[row + 2, k], states[row + 3, k]
        a0 += s0 * a
        a1 += s1 * a
        a2 += s2 * a
        a3 += s3 * a
        b0 += s0 * b
        b1 += s1 * b
        b2 += s2 * b
        b3 += s3 * b
    return (a0, a1, a2, a3), (b0, b1, b2, b3)


@njit(parallel=True, cache=True, fastmath=FASTMATH, error_model="numpy")
def multiply(states, weights, scales, products):
    """Multiply rows with rounded weights.

    Args:
        states: Rows, ``[T, K]``.
        weights: Integers, ``[N, K]``.
        scales: What they are multiplied with, ``[N]``.
        products: Receives ``states @ (scales * weights).T``, ``[T, N]``.
    """
    num_rows, num_outputs = products.shape
    for tile in prange((num_outputs + _TILE - 1) // _TILE):
        end = min((tile + 1) * _TILE, num_outputs)
        for n in range(tile * _TILE, end, 2):
            m = min(n + 1, end - 1)  # an odd last row is computed twice
            row = 0
            while row + 4 <= num_rows:
                first, second = _dots(states, row, weights, n, m)
                for i in range(4):
                    products[row + i, n] = first[i] * scales[n]
                    products[row + i, m] = second[i] * scales[m]
                row += 4
            while row < num_rows:
                products[row, n] = _dot(states, row, weights, n) * scales[n]
                products[row, m] = _dot(states, row, weights, m) * scales[m]
                row += 1
