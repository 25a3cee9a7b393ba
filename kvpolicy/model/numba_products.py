"""Products of a few rows with weights in integers, in Numba: each weight is read once.

A decode step takes little more than reading the weights, and fewer bytes are read in less time.
Integers become fp32 in registers. Up to four rows are multiplied with them there, as queries are
with rows of a cache; one or two rows have too few sums for that, and are multiplied one after the
other. Sums are in fp32.

Importing it needs the extra ``cpu``.
"""

import numpy as np
from numba import njit, prange

from kvpolicy.attention.numba_backend.kept import kept
from kvpolicy.attention.numba_backend.lanes import LANES
from kvpolicy.attention.numba_backend.tiles import SIGNED, of_form
from kvpolicy.numba_common import FASTMATH, start_threads

start_threads()

_TILE = 16  # outputs that are one task, which are a multiple of those that are written at once

# Bytes by which the processor is told of weights before they are multiplied. By itself it reads
# ahead while weights come from the memory, and stops while they are multiplied with more rows.
_AHEAD = 2**14

_FEW = 2  # rows that are multiplied one after the other

_multiply, _ = of_form(SIGNED)


@njit(fastmath=FASTMATH, error_model="numpy")
def _dot(states, row, weights, n):
    """The product of one row with one row of weights."""
    total = np.float32(0)
    for k in range(weights.shape[1]):
        total += states[row, k] * np.float32(weights[n, k])
    return total


@kept(parallel=True)
def multiply(states, weights, scales, products):
    """Multiply rows with rounded weights.

    Args:
        states: Rows, ``[T, K]``.
        weights: Integers, ``[N, K]``.
        scales: What they are multiplied with, ``[N]``.
        products: Receives ``states @ (scales * weights).T``, ``[T, N]``, and numbers of no meaning
            in up to three more columns.
    """
    num_rows, num_outputs, width = states.shape[0], weights.shape[0], weights.shape[1]
    whole, ahead = width - width % LANES, _AHEAD // width
    for tile in prange((num_outputs + _TILE - 1) // _TILE):
        first, end = tile * _TILE, min((tile + 1) * _TILE, num_outputs)
        if num_rows <= _FEW:
            for n in range(first, end):
                for row in range(num_rows):
                    products[row, n] = _dot(states, row, weights, n) * scales[n]
            continue
        _multiply(states, weights[first:end], ahead, first, products)
        for row in range(num_rows):
            for n in range(first, end):
                total = products[row, n]
                for k in range(whole, width):
                    total += states[row, k] * np.float32(weights[n, k])
                products[row, n] = total * scales[n]


def num_columns(num_outputs: int) -> int:
    """Columns that `multiply` writes of so many outputs."""
    return num_outputs + -num_outputs % 4
