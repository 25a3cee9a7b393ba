"""Oracle of rows in integers, in loops over the numbers of a row; imports nothing of kvpolicy."""

import numpy as np


def group_of(dim, bits):
    """Channels that share a step: the head with 8 bits, else the largest part of 32 that fits."""
    return dim if bits == 8 else next(size for size in (32, 16, 8, 4, 2) if dim % size == 0)


def bf16(number):
    """The nearest bf16 of an fp32 number, ties to even, as its two bytes and as a number."""
    pattern = int(np.float32(number).view(np.uint32))
    upper, lower = pattern >> 16, pattern & 0xFFFF
    upper += lower > 0x8000 or (lower == 0x8000 and upper & 1)
    return [upper & 0xFF, upper >> 8], np.uint32(upper << 16).view(np.float32)


def stored(row, bits):
    """The bytes of one row of a head."""
    codes, scales = [], []
    row = [np.float32(x) for x in row]
    size, levels = group_of(len(row), bits), np.float32(2**bits - 1)
    for start in range(0, len(row), size):
        group = row[start : start + size]
        least, most = min(group), max(group)
        least_bytes, low = bf16(least)
        if low > least:
            least_bytes, low = bf16(least - abs(least) * np.float32(2**-8))
        least = low
        step_bytes, step = bf16((most - least) * np.float32((1 + 2**-8) / (2**bits - 1)))
        own = [int(min(max(np.round((x - least) / step), 0), levels)) if step else 0 for x in group]
        half = size // 2
        codes += own if bits == 8 else [a + 16 * b for a, b in zip(own, own[half:], strict=False)]
        scales += [*step_bytes, *least_bytes]
    return [*codes, *scales]


def numbers(row, dim, bits):
    """What the bytes of one row of a head stand for."""
    size, found = group_of(dim, bits), []
    num_codes = dim * bits // 8
    for group in range(dim // size):
        scale = row[num_codes + 4 * group : num_codes + 4 * group + 4]
        step, least = (
            np.uint32((scale[at + 1] << 24) + (scale[at] << 16)).view(np.float32) for at in (0, 2)
        )
        codes = row[group * size * bits // 8 : (group + 1) * size * bits // 8]
        codes = codes if bits == 8 else [c % 16 for c in codes] + [c // 16 for c in codes]
        found += [float(least) + float(step) * code for code in codes]
    return found
