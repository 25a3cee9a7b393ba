"""Decode attention in Numba over rows in integers, which become numbers in registers.

What is stored of a new row is what `kvpolicy.attention.integers.quantize` gives, to the bit: its
operations are done here one after the other, and none is reordered.
"""

import numpy as np
from numba import njit, prange

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.base import DecodeLayer
from kvpolicy.attention.integers import group_size
from kvpolicy.attention.numba_backend.decode import NumbaLayer, cut, weigh
from kvpolicy.numba_common import FASTMATH

_BLOCK = 32  # rows that become numbers at once, which stay in the first cache
_TINY = np.finfo(np.float32).tiny
_ROUNDING = np.float32(2**-8)  # see `kvpolicy.attention.integers`


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


@njit(error_model="numpy")
def _store(row, bits, size, stored, scratch):
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
def _scales(stored, num_codes):
    """Step and least number of each group of rows, ``[T, groups]`` each."""
    num_rows, num_groups = stored.shape[0], (stored.shape[1] - num_codes) // 4
    found = np.empty((2, num_rows, num_groups), np.uint32)
    for row in range(num_rows):
        for group in range(num_groups):
            for part in range(2):
                at = num_codes + 4 * group + 2 * part
                found[part, row, group] = (np.uint32(stored[row, at + 1]) << np.uint32(24)) | (
                    np.uint32(stored[row, at]) << np.uint32(16)
                )
    numbers = found.view(np.float32)
    return numbers[0], numbers[1]


@njit(error_model="numpy")
def _codes(stored, bits, size, codes):
    """Write the codes of rows in bytes as numbers, ``[T, D]``."""
    dim, half = codes.shape[1], size // 2
    for row in range(stored.shape[0]):
        # Slices begin at 0, so that loops over them need no check of the index.
        if bits == 8:
            for i in range(dim):
                codes[row, i] = np.float32(stored[row, i])
        else:
            for group in range(dim // size):
                of_group = stored[row, group * half : (group + 1) * half]
                low = codes[row, group * size : group * size + half]
                high = codes[row, group * size + half : (group + 1) * size]
                for i in range(half):
                    low[i] = np.float32(of_group[i] & np.uint8(15))
                for i in range(half):
                    high[i] = np.float32(of_group[i] >> np.uint8(4))


@njit(fastmath=FASTMATH, error_model="numpy")
def _logits(query, keys, bits, size, scaling, logits):
    """Logits of the heads of a group, ``[G, D]``, for rows in bytes: those of codes, and a sum.

    ``q . (least + step * code)`` is ``least * sum(q) + step * (q . code)``, group by group.
    """
    (members, dim), num_rows = query.shape, keys.shape[0]
    num_codes = dim * bits // 8
    codes, logits[:] = np.empty((_BLOCK, dim), np.float32), 0
    for first in range(0, num_rows, _BLOCK):
        block = keys[first : first + _BLOCK]
        num = block.shape[0]
        _codes(block, bits, size, codes)
        steps, leasts = _scales(block, num_codes)
        of_block = logits[:, first : first + _BLOCK]
        for group in range(dim // size):
            of_group = codes[:, group * size : (group + 1) * size]
            for member in range(members):
                part = query[member, group * size : (group + 1) * size]
                total = np.float32(0)
                for i in range(size):
                    total += part[i]
                for row in range(num):
                    dot = np.float32(0)
                    for i in range(size):
                        dot += part[i] * of_group[row, i]
                    logit = leasts[row, group] * total + steps[row, group] * dot
                    of_block[member, row] += logit * scaling


@njit(fastmath=FASTMATH, error_model="numpy")
def _mean(weights, values, bits, size, output):
    """Means of rows in bytes under weights ``[G, T]``, as ``[G, D]``."""
    (members, num_rows), dim = weights.shape, output.shape[1]
    num_codes = dim * bits // 8
    codes, output[:] = np.empty((_BLOCK, dim), np.float32), 0
    for first in range(0, num_rows, _BLOCK):
        block = values[first : first + _BLOCK]
        num = block.shape[0]
        _codes(block, bits, size, codes)
        steps, leasts = _scales(block, num_codes)
        of_block = weights[:, first : first + _BLOCK]
        for group in range(dim // size):
            of_group = codes[:, group * size : (group + 1) * size]
            for member in range(members):
                part = output[member, group * size : (group + 1) * size]
                least = np.float32(0)
                for row in range(num):
                    weight = of_block[member, row]
                    least += weight * leasts[row, group]
                    weight *= steps[row, group]
                    for i in range(size):
                        part[i] += weight * of_group[row, i]
                for i in range(size):
                    part[i] += least


_ROWS, _SLAB, _SLAB_OF_NUMBERS = "f4[:,:,:]", "u1[:,:,:,::1]", "f4[:,:,::1]"
_SIGNATURE = (
    f"void({_ROWS}, {_ROWS}, {_ROWS}, {_SLAB}, {_SLAB}, i8[:,:,::1], "
    f"{', '.join([_SLAB_OF_NUMBERS] * len(ACCUMULATORS))}, f4[:,:,:,::1], "
    f"i8[:], b1[:], i8[:,:], i8, i8, i8, i8, i8, f4[:], i8[:,:], f4, f4, i8, f4, "
    f"{_SLAB_OF_NUMBERS})"
)


@njit(_SIGNATURE, parallel=True, cache=True, error_model="numpy")
def _decode(
    query,
    key,
    value,
    keys,
    values,
    positions,
    sums,
    squares,
    squares_logit,
    squares_logit2,
    window,
    seq_len,
    live,
    bounds,
    capacity,
    key_bits,
    key_size,
    value_bits,
    value_size,
    sinks,
    rows,
    scaling,
    softcap,
    sliding_window,
    factor,
    output,
):
    num_slots, num_heads = rows.shape
    group, dim = query.shape[1] // num_heads, query.shape[2]
    for task in prange(num_slots * num_heads):
        slot = task // num_heads
        head = task - slot * num_heads
        if live[slot]:
            # Slabs of heads that have segments are given as those of one head, `at`.
            at, first, newest, position = head, 0, rows[slot, head], seq_len[slot]
            if bounds.shape[0]:
                at, first = 0, bounds[slot, head]
                newest += bounds[slot, head + 1] - capacity
            scratch = np.empty(1, np.float32)
            _store(key[slot, head], key_bits, key_size, keys[slot, at, newest], scratch)
            _store(value[slot, head], value_bits, value_size, values[slot, at, newest], scratch)
            positions[slot, at, newest] = position
            for member in range(group if window.shape[2] else 0):
                own = head * group + member
                for i in range(dim):
                    window[slot, own, position % window.shape[2], i] = query[slot, own, i] * factor
            if sliding_window:
                while positions[slot, at, first] <= position - sliding_window:
                    first += 1
            end = newest + 1
            queries = np.empty((group, dim), np.float32)
            queries[:] = query[slot, head * group : (head + 1) * group]
            weights = np.empty((group, end - first), np.float32)
            _logits(queries, keys[slot, at, first:end], key_bits, key_size, scaling, weights)
            weigh(
                weights,
                cut(sums, slot, at, first, end),
                cut(squares, slot, at, first, end),
                cut(squares_logit, slot, at, first, end),
                cut(squares_logit2, slot, at, first, end),
                sinks[head * group : (head + 1) * group],
                softcap,
            )
            _mean(
                weights,
                values[slot, at, first:end],
                value_bits,
                value_size,
                output[slot, head * group : (head + 1) * group],
            )
        else:
            output[slot, head * group : (head + 1) * group] = 0


class NumbaIntegers(NumbaLayer):
    """Decode attention in one layer whose rows are in integers, of a model in fp32."""

    kernel = staticmethod(_decode)

    def __init__(self, layer: DecodeLayer) -> None:
        super().__init__(layer)
        self._bits = layer.key_bits, layer.value_bits

    def more(self, head_dim: int) -> list[int]:
        """Bits, and channels of a group, of keys and of values."""
        return [one for bits in self._bits for one in (bits, group_size(head_dim, bits))]
