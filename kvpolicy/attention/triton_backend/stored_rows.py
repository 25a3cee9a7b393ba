"""Rows as they are stored, in Triton: storing a new one, and reading a block of them as numbers.

What is stored of a new row is what `kvpolicy.attention.integers.quantize` gives, to the bit: its
operations are done here one after the other. Integers become numbers in registers, and nothing but
their bytes is read. Step and least number of a group are bf16 at even addresses: they are moved as
patterns of 16 bits.
"""

from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from kvpolicy.attention.base import DecodeLayer
from kvpolicy.attention.integers import group_size
from kvpolicy.triton_common import INTERPRETED, power_of_2, rounded, row_strides

_ROUNDING = tl.constexpr(2**-8)  # see `kvpolicy.attention.integers`
_TINY = tl.constexpr(2**-126)
# Added and taken away again, it rounds a small number to the nearest whole one, ties to even.
_WHOLE = tl.constexpr(1.5 * 2**23)
_LARGEST_ACCESS = 16  # bytes that a thread reads at once


def forms_of(layer: DecodeLayer, dim: int, value_dim: int, least_block: int = 1) -> dict[str, int]:
    """What kernels are told of the form of keys and values, see `store_row`.

    Args:
        layer: The layer.
        dim: Size of a head of keys.
        value_dim: Size of one of values.
        least_block: The least block of channels.
    """
    sides = (
        ("", "KEY", dim, layer.keys, layer.key_bits, layer.exact_keys),
        ("VALUE_", "VALUE", value_dim, layer.values, layer.value_bits, layer.exact_values),
    )
    forms: dict[str, int] = {}
    for of_dim, name, size, slab, bits, ring in sides:
        assert ring is None or ring[0].is_contiguous(), "the ring of a slot is one block"
        forms |= {
            f"{of_dim}DIM": size,
            f"{of_dim}DIM_BLOCK": max(power_of_2(size), least_block),
            f"{name}_BITS": bits,
            f"{name}_SIZE": group_size(size, bits),
            f"{name}_UNIT": _unit(slab, bits),
            f"{name}_EXACT": 0 if ring is None else ring.shape[2],
        }
    return forms


def strides_of(layer: DecodeLayer) -> list[int]:
    """Strides of slot, KV head and row of keys, then of values, in units; of slots of the rings.

    Kernels multiply by the unit again: then the compiler knows how many bytes may be read at once.
    """
    strides = []
    for slab, bits in ((layer.keys, layer.key_bits), (layer.values, layer.value_bits)):
        strides += [stride // _unit(slab, bits) for stride in row_strides(slab)]
    rings = layer.exact_keys, layer.exact_values
    return strides + [0 if ring is None else ring.stride(0) for ring in rings]


def _unit(slab: Tensor, bits: int) -> int:
    return gcd(_LARGEST_ACCESS, *row_strides(slab)) if bits else 1


@triton.jit
def store_row(
    new,
    stored,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Store one row of a head.

    Args:
        new: Where its numbers are.
        stored: Where it goes.
        DIM: Its channels.
        DIM_BLOCK: A power of 2 that is not below.
        BITS: Bits of a number in integers; 0: numbers are stored as they are.
        SIZE: Channels of a group.
    """
    if BITS == 0:
        d = tl.arange(0, DIM_BLOCK)
        row = tl.load(new + d, mask=d < DIM)
        tl.store(stored + d, row.to(stored.dtype.element_ty), mask=d < DIM)
    else:
        # A head of 8 bits is one group, of any size; with 4 bits its size is a power of 2.
        GROUPS: tl.constexpr = 1 if BITS == 8 else DIM_BLOCK // SIZE
        LEVELS: tl.constexpr = 2**BITS - 1
        g, i = tl.arange(0, GROUPS), tl.arange(0, DIM_BLOCK // GROUPS)
        is_group, is_channel = (g * SIZE < DIM), (i < SIZE)[None, :]
        ok = is_group[:, None] & is_channel
        x = tl.load(new + g[:, None] * SIZE + i[None, :], mask=ok, other=0.0).to(tl.float32)
        least = tl.min(tl.where(is_channel, x, float("inf")), 1)
        most = tl.max(tl.where(is_channel, x, float("-inf")), 1)
        # A number that is none passes on, as in torch.
        has_nan = tl.max((x != x).to(tl.int32), 1) != 0
        least = tl.where(has_nan, float("nan"), least)
        low = _to_bf16(least)
        below = _to_bf16(least - tl.abs(least) * _ROUNDING)
        low = tl.where(_from_bf16(low) > least, below, low)
        lows = _from_bf16(low)
        step = _to_bf16((most - lows) * ((1 + _ROUNDING) / LEVELS))
        # A group of equal numbers may have step 0.
        steps = tl.maximum(_from_bf16(step), _TINY)
        code = tl.div_rn(x - lows[:, None], tl.broadcast_to(steps[:, None], x.shape))
        code = tl.where(code > 0, code, 0.0)  # NaN is not larger
        code = (tl.minimum(code, LEVELS) + _WHOLE) - _WHOLE
        code = code.to(tl.int32)
        if BITS == 8:
            tl.store(stored + i[None, :], code.to(tl.uint8), mask=ok)
        else:
            HALF: tl.constexpr = SIZE // 2
            half = tl.arange(0, 2)[None, :, None]
            byte = tl.sum(code.reshape(GROUPS, 2, HALF) << (4 * half), 1)
            j = tl.arange(0, HALF)
            at = g[:, None] * HALF + j[None, :]
            tl.store(stored + at, byte.to(tl.uint8), mask=is_group[:, None] & (j < HALF)[None, :])
        scales = (stored + DIM * BITS // 8 + 4 * g).to(tl.pointer_type(tl.uint16), bitcast=True)
        tl.store(scales, step.to(tl.uint16), mask=is_group)
        tl.store(scales + 1, low.to(tl.uint16), mask=is_group)


@triton.jit
def read_rows(
    slab,
    at,
    is_row,
    kind: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A block of rows as numbers, ``[BLOCK, DIM_BLOCK]``, 0 where there is none.

    Args:
        slab: The slab.
        at: Where the rows begin in it, ``[BLOCK]``.
        is_row: Which of them there are.
        kind: Precision of numbers that integers stand for.
        DIM: See `store_row`.
        DIM_BLOCK: See there.
        BITS: See there.
        SIZE: See there.
        UNIT: Bytes of which a row has a multiple.
    """
    d = tl.arange(0, DIM_BLOCK)
    stored = is_row[:, None] & (d < DIM)[None, :]
    if BITS == 0:
        rows = tl.load(slab + at[:, None] + d[None, :], mask=stored, other=0.0)
    else:
        GROUPS: tl.constexpr = 1 if BITS == 8 else DIM_BLOCK // SIZE
        place = d
        if BITS == 4:  # the two codes of a byte are half a group apart
            place = d // SIZE * (SIZE // 2) + d % (SIZE // 2)
        code = tl.load(slab + at[:, None] + place[None, :], mask=stored, other=0)
        if BITS == 4:
            upper = (d // (SIZE // 2) % 2)[None, :]
            code = tl.where(upper == 0, code & 15, code >> 4)
        g = tl.arange(0, GROUPS)
        CODES: tl.constexpr = DIM * BITS // 8
        scales = slab + at[:, None] + (CODES + 4 * g)[None, :]
        is_group = is_row[:, None] & (g * SIZE < DIM)[None, :]
        step, least = _step_and_least(scales, is_group, UNIT % 4 == 0 and CODES % 4 == 0)
        step, least = _of_channels(step, DIM_BLOCK), _of_channels(least, DIM_BLOCK)
        rows = rounded(least + step * code.to(tl.float32), kind).to(kind)
    return rows


@triton.jit
def read_codes(
    slab,
    at,
    is_row,
    kind: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A block of rows in 8 bits, for products that are scaled afterwards.

    A channel is ``middle + step * code``, with codes from -128 to 127, which 16 bits hold exactly.

    Returns:
        Codes of precision ``kind``, ``[BLOCK, DIM_BLOCK]``; steps and middles in fp32, ``[BLOCK]``,
        0 where there is no row.
    """
    d = tl.arange(0, DIM_BLOCK)
    code = tl.load(
        slab + at[:, None] + d[None, :], mask=is_row[:, None] & (d < DIM)[None, :], other=0
    )
    step, least = _step_and_least(slab + at + DIM, is_row, UNIT % 4 == 0 and DIM % 4 == 0)
    return _centred(code, kind), step, least + 128 * step


@triton.jit
def _step_and_least(scales, mask, TOGETHER: tl.constexpr):
    """Steps and least numbers of groups in fp32, 0 where there is none.

    Loads of 4 bytes are done ahead of their use; those of 2 bytes are waited for.
    """
    if TOGETHER:
        both = tl.load(scales.to(tl.pointer_type(tl.uint32), bitcast=True), mask=mask, other=0)
        step, least = both & 0xFFFF, both >> 16
    else:
        halves = scales.to(tl.pointer_type(tl.uint16), bitcast=True)
        step = tl.load(halves, mask=mask, other=0)
        least = tl.load(halves + 1, mask=mask, other=0)
    return _from_bf16(step), _from_bf16(least)


@triton.jit
def _centred(code, kind: tl.constexpr):
    """Bytes less 128, in 16 bits."""
    if INTERPRETED or kind != tl.bfloat16:
        centred = (code.to(tl.float32) - 128).to(kind)
    else:
        # Four bytes at a time, without a conversion: 0x4300 with the lower 7 bits of a byte is 128
        # more than these, and 128 or 256 is taken away. Declared impure, it is not moved behind the
        # rearrangement for tensor cores, where a thread would read single bytes.
        centred = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, from, less, one;
            mov.b32 one, 0x3f803f80;
            prmt.b32 low, $2, 0, 0x4140;
            prmt.b32 high, $2, 0, 0x4342;
            lop3.b32 from, low, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 less, low, 0x00800080, 0xc300c300, 0xae;
            fma.rn.bf16x2 $0, from, one, less;
            lop3.b32 from, high, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 less, high, 0x00800080, 0xc300c300, 0xae;
            fma.rn.bf16x2 $1, from, one, less;
            }
            """,
            "=r,=r,r",
            [code],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    return centred


@triton.jit
def put_exact(
    rows,
    ring,
    position,
    is_near,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Put exact copies in the place of rows that are near enough to a query.

    Args:
        rows: What integers stand for, ``[BLOCK, DIM_BLOCK]``.
        ring: The exact copies of a head, ``[EXACT, DIM]``, see `kvpolicy.attention.exact`.
        position: Position of each row, ``[BLOCK]``.
        is_near: Which of them are near enough.
        DIM: See `store_row`.
        DIM_BLOCK: See there.
        EXACT: Rows of a ring; 0: there is none.
    """
    if EXACT > 0:
        d = tl.arange(0, DIM_BLOCK)
        at = tl.where(is_near, position % EXACT, 0) * DIM
        copied = is_near[:, None] & (d < DIM)[None, :]
        exact = tl.load(ring + at[:, None] + d[None, :], mask=copied, other=0.0)
        rows = tl.where(is_near[:, None], exact.to(rows.dtype), rows)
    return rows


@triton.jit
def _of_channels(of_groups, DIM_BLOCK: tl.constexpr):
    """Numbers of groups, ``[BLOCK, GROUPS]``, as those of their channels."""
    BLOCK: tl.constexpr = of_groups.shape[0]
    GROUPS: tl.constexpr = of_groups.shape[1]
    size: tl.constexpr = DIM_BLOCK // GROUPS
    return tl.broadcast_to(of_groups[:, :, None], (BLOCK, GROUPS, size)).reshape(BLOCK, DIM_BLOCK)


@triton.jit
def _to_bf16(number):
    """The pattern of the nearest bf16, in 32 bits."""
    pattern = number.to(tl.uint32, bitcast=True)
    nearest = pattern + 0x7FFF + ((pattern >> 16) & 1)
    return tl.where(number == number, nearest, pattern) >> 16


@triton.jit
def _from_bf16(pattern):
    """The number of a pattern."""
    return (pattern.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
