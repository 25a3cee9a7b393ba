"""Rows as they are stored, in Numba: storing a new one, and reading some of them as numbers.

Rows have a *form*: the bits of a number in integers, or one of `FP32`, `BF16` and `FP16` for
numbers as they are. What is stored of a new row are its bytes, or in integers what
`kvpolicy.attention.integers.quantize` gives, to the bit: its operations are done here one after the
other, and none is reordered.
"""

import numpy as np
from numba import njit

from kvpolicy.attention.numba_backend.lanes import (
    LANES,
    WIDE,
    plus_product,
    read_bf16,
    read_bytes,
    read_fp16,
    read_lower,
    read_several_bf16,
    read_several_fp16,
    read_upper,
    repeated,
    write,
)

FP32, BF16, FP16 = 0, 16, 17

_TINY = np.finfo(np.float32).tiny
_ROUNDING = np.float32(2**-8)  # see `kvpolicy.attention.integers`


@njit(error_model="numpy")
def store(row, own, form, size, stored):
    """Write a row of a head as bytes.

    Args:
        row: The row, ``[D]``.
        own: Its bytes, in the precision of the model.
        form: How it is stored.
        size: Channels of a group.
        stored: Where to; all bytes of a row.
    """
    if form == 8 or form == 4:
        _quantize(row, form, size, stored, np.empty(1, np.float32))
    else:
        stored[:] = own


@njit(error_model="numpy")
def numbers(stored, form, size, scratch):
    """Rows of a head as numbers, ``[T, D]``: themselves, or in a scratch array ``[>= T, D]``."""
    if form == FP32:
        return stored.view(np.float32)
    if form == 8:
        _from_bytes(stored, scratch)
    elif form == 4:
        _from_halves(stored, size, scratch)
    elif form == BF16:
        _from_bf16(stored, scratch)
    else:
        _from_fp16(stored, scratch)
    return scratch[: stored.shape[0]]


@njit(error_model="numpy")
def read_scales(stored, dim, steps, leasts):
    """Read step and least number of rows with a byte for each of so many channels."""
    for row in range(stored.shape[0]):
        steps[row] = read_bf16(stored, row, dim)
        leasts[row] = read_bf16(stored, row, dim + 2)


@njit(error_model="numpy")
def num_near(positions, newest, ring):
    """How many of some rows, the last ones, have exact copies, see `put_exact`."""
    size, num_rows = ring.shape[0], positions.shape[0]
    near = 0
    while size and near < num_rows and positions[num_rows - 1 - near] > newest - size:
        near += 1
    return near


@njit(error_model="numpy")
def put_exact(rows, positions, newest, ring, form):
    """Put exact copies in the place of those of some rows that are near enough to a query.

    Args:
        rows: What integers stand for, ``[T, D]``.
        positions: Their positions, which rise, ``[T]``.
        newest: Position of the query.
        ring: Bytes of the exact copies, ``[E, ...]``, see `kvpolicy.attention.exact`.
        form: Their form.
    """
    scratch = np.empty((1, rows.shape[1]), np.float32)
    for row in range(rows.shape[0] - num_near(positions, newest, ring), rows.shape[0]):
        place = positions[row] % ring.shape[0]
        rows[row] = numbers(ring[place : place + 1], form, 0, scratch)[0]


@njit(error_model="numpy")
def _from_bf16(stored, scratch):
    """Numbers of rows in bf16."""
    dim = scratch.shape[1]
    whole = dim - dim % LANES
    for row in range(stored.shape[0]):
        for i in range(0, whole, LANES):
            write(scratch, row, i, read_several_bf16(stored, row, 2 * i))
        for i in range(whole, dim):
            scratch[row, i] = read_bf16(stored, row, 2 * i)


@njit(error_model="numpy")
def _from_fp16(stored, scratch):
    """Numbers of rows in fp16."""
    dim = scratch.shape[1]
    whole = dim - dim % LANES
    for row in range(stored.shape[0]):
        for i in range(0, whole, LANES):
            write(scratch, row, i, read_several_fp16(stored, row, 2 * i))
        for i in range(whole, dim):
            scratch[row, i] = read_fp16(stored, row, 2 * i)


@njit(error_model="numpy")
def _from_bytes(stored, scratch):
    """Numbers of rows with a byte for each channel, whose head is a group."""
    dim = scratch.shape[1]
    whole, wide = dim - dim % LANES, dim - dim % WIDE
    for row in range(stored.shape[0]):
        step, least = read_bf16(stored, row, dim), read_bf16(stored, row, dim + 2)
        steps, leasts = repeated(step), repeated(least)
        for i in range(0, wide, WIDE):
            for part in range(i, i + WIDE, LANES):
                codes = read_bytes(stored, row, part)
                write(scratch, row, part, plus_product(leasts, codes, steps))
        for i in range(wide, whole, LANES):
            write(scratch, row, i, plus_product(leasts, read_bytes(stored, row, i), steps))
        for i in range(whole, dim):
            scratch[row, i] = least + step * np.float32(stored[row, i])


@njit(error_model="numpy")
def _from_halves(stored, size, scratch):
    """Numbers of rows with four bits for each channel, in groups of so many."""
    dim, half = scratch.shape[1], size // 2
    scales, whole = dim // 2, half - half % LANES
    for row in range(stored.shape[0]):
        for group in range(dim // size):
            step = read_bf16(stored, row, scales + 4 * group)
            least = read_bf16(stored, row, scales + 4 * group + 2)
            steps, leasts = repeated(step), repeated(least)
            at, low, high = group * half, group * size, group * size + half
            for i in range(0, whole, LANES):
                codes = read_lower(stored, row, at + i)
                write(scratch, row, low + i, plus_product(leasts, codes, steps))
                codes = read_upper(stored, row, at + i)
                write(scratch, row, high + i, plus_product(leasts, codes, steps))
            for i in range(whole, half):
                both = stored[row, at + i]
                scratch[row, low + i] = least + step * np.float32(both & np.uint8(15))
                scratch[row, high + i] = least + step * np.float32(both >> np.uint8(4))


@njit(error_model="numpy")
def _quantize(row, bits, size, stored, scratch):
    """Write the bytes of a row of a head, ``[D]``, whose groups have so many channels."""
    dim, levels = row.shape[0], np.float32((1 << bits) - 1)
    share = np.float32((1 + 2**-8) / ((1 << bits) - 1))
    num_codes = dim * bits // 8
    codes = np.empty(size, np.uint8)
    for group in range(dim // size):
        least = most = row[group * size]
        for i in range(group * size, (group + 1) * size):
            number = row[i]
            # A number that is none passes on, as in torch.
            least = number if number < least or number != number else least
            most = number if number > most or number != number else most
        scales = stored[num_codes + 4 * group : num_codes + 4 * group + 4]
        low = _to_bf16(least, scales[2:], scratch)
        if low > least:
            low = _to_bf16(least - abs(least) * _ROUNDING, scales[2:], scratch)
        step = _to_bf16((most - low) * share, scales, scratch)
        step = max(step, _TINY)
        for i in range(size):
            code = np.rint((row[group * size + i] - low) / step)
            code = code if code > 0 else np.float32(0)
            codes[i] = np.uint8(min(code, levels))
        if bits == 8:
            stored[group * size : (group + 1) * size] = codes
        else:
            half = size // 2
            for i in range(half):
                stored[group * half + i] = codes[i] | (codes[half + i] << 4)


@njit(error_model="numpy")
def _to_bf16(number, place, scratch):
    """Write the nearest bf16 of a number to two bytes; returns it."""
    scratch[0] = number
    pattern = scratch.view(np.uint32)
    if number == number:
        pattern[0] += np.uint32(0x7FFF) + ((pattern[0] >> np.uint32(16)) & np.uint32(1))
    pattern[0] &= np.uint32(0xFFFF0000)
    place[0] = (pattern[0] >> np.uint32(16)) & np.uint32(255)
    place[1] = pattern[0] >> np.uint32(24)
    return scratch[0]
