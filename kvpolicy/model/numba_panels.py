"""Products of a few rows with packed weights, in Numba, at the speed at which memory is read.

oneDNN keeps packed weights in *panels* of 64 outputs: what the first number of a row is multiplied
with for all 64, then what the second one is; in bfloat16 two numbers at a time. So the weights of a
product are read from the first byte to the last, and 64 sums are in registers meanwhile. Sums are
in fp32, and a row has the same to the last bit whoever is with it.

That the weights lie so is not promised by anyone; it is looked at, once for each description of
memory that oneDNN gives (`Panels.of`).

Importing it needs the extra ``cpu``.
"""

import ctypes
from typing import Self

import attrs
import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

from kvpolicy.attention.numba_backend.kept import kept
from kvpolicy.attention.numba_backend.lanes import WIDE
from kvpolicy.attention.numba_backend.rows import FP32
from kvpolicy.attention.numba_backend.tiles import (
    FIRST_BF16,
    SECOND_BF16,
    TOGETHER,
    tile_of,
)
from kvpolicy.numba_common import start_threads, take_threads

start_threads()

OUTPUTS = WIDE  # of a panel

# Of a row, so many numbers are multiplied with a panel before the next rows are: these weights stay
# in the second cache.
_BLOCK = 512

_LINE = 4 * OUTPUTS  # bytes of a panel for one number of a row, or two in bfloat16

# Rows up to which reading weights takes longer than multiplying them, which processors do faster
# in bfloat16 than it is done here.
MOST_ROWS = {torch.float32: 8, torch.bfloat16: 4}


@attrs.frozen(eq=False)
class Panels:
    """Packed weights of a product ``[N, K]``, by where they are.

    Attributes:
        packed: The weights, as oneDNN has them.
        address: Of the first panel.
        num_outputs: ``N``; the last panel may have others, which are 0.
        depth: Lines of a panel.
        width: ``K``.
        dtype: Their precision.
    """

    packed: Tensor
    address: int
    num_outputs: int
    depth: int
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, packed: Tensor) -> Self | None:
        """Those of a packed tensor; ``None``: its weights lie otherwise."""
        num_outputs, width = packed.shape
        try:
            address = torch.ops.mkldnn.data_ptr(packed)
            num_bytes = torch.ops.mkldnn._nbytes(packed)
            kind = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())
        except (AttributeError, RuntimeError):  # another release of torch
            return None
        depth, rest = divmod(num_bytes, -(-num_outputs // OUTPUTS) * _LINE)
        if packed.dtype not in MOST_ROWS or rest or depth * _numbers(packed.dtype) < width:
            return None
        panels = cls(packed, address, num_outputs, depth, width, packed.dtype)
        if kind not in _LIES_SO:
            _LIES_SO[kind] = panels._has(packed.to_dense())
        return panels if _LIES_SO[kind] else None

    def multiply(self, states: int, stride: int, products: Tensor) -> None:
        """Multiply rows ``[T, K]`` in fp32 at an address, one so many numbers behind another.

        With weights in bfloat16, rows and products are rounded to it, as oneDNN has them.

        Args:
            states: The address.
            stride: Numbers from row to row.
            products: Receives the products, ``[T, N]`` or more axes; contiguous.
        """
        take_threads()
        _multiply(
            self.address,
            self.depth,
            self.width,
            self.num_outputs,
            self.dtype == torch.bfloat16,
            states,
            stride,
            products.numel() // self.num_outputs,
            products.data_ptr(),
        )

    def _has(self, weights: Tensor) -> bool:
        """Whether the panels hold these weights."""
        pairs = _numbers(self.dtype)
        num_panels = -(-self.num_outputs // OUTPUTS)
        size = num_panels * self.depth * _LINE
        held = torch.frombuffer((ctypes.c_char * size).from_address(self.address), dtype=self.dtype)
        held = held.view(num_panels, self.depth, OUTPUTS, pairs).transpose(1, 2)
        return all(
            torch.equal(panel.flatten(1)[: len(some), : self.width], some)
            for panel, some in zip(held, weights.split(OUTPUTS), strict=True)
        )


_LIES_SO: dict[bytes, bool] = {}  # whether weights lie in panels, by what oneDNN says of memory


def _numbers(dtype: torch.dtype) -> int:
    """Numbers of a row that a line of a panel is for."""
    return 4 // dtype.itemsize


@intrinsic
def _bytes_at(typingctx, address):
    """A pointer to bytes."""

    def make(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.PointerType(ir.IntType(8)))

    return types.CPointer(types.uint8)(types.int64), make


@intrinsic
def _numbers_at(typingctx, address):
    """A pointer to numbers."""

    def make(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.PointerType(ir.FloatType()))

    return types.CPointer(types.float32)(types.int64), make


def _loop(members, dtype):
    """What adds up products of so many rows with lines of a panel."""
    empty, read, write, *_, plus = tile_of(FP32, members)
    if dtype == torch.bfloat16:
        *_, plus_first = tile_of(FIRST_BF16, members)
        *_, plus_second = tile_of(SECOND_BF16, members)

        @njit(error_model="numpy")
        def add(states, member, panel, start, end, width, sums):
            """Add those with numbers from ``start`` to ``end`` of rows from ``member`` on."""
            own = read(sums, member, 0) if start else empty()
            pairs = min(end, width) // 2
            for line in range(start // 2, pairs):
                own = plus_first(own, states, member, 2 * line, panel, line, 0)
                own = plus_second(own, states, member, 2 * line + 1, panel, line, 0)
            if 2 * pairs < min(end, width):
                own = plus_first(own, states, member, 2 * pairs, panel, pairs, 0)
            write(sums, member, 0, own)

    else:

        @njit(error_model="numpy")
        def add(states, member, panel, start, end, width, sums):
            """Likewise."""
            own = read(sums, member, 0) if start else empty()
            for line in range(start, min(end, width)):
                own = plus(own, states, member, line, panel, line, 0)
            write(sums, member, 0, own)

    return add


def _multiplier(dtype):
    """The function that multiplies rows with a panel."""
    add_one, add_two, add_three, add_four = (_loop(members, dtype) for members in (1, 2, 3, 4))
    none = np.int64(0)  # for a literal Numba would compile the loops once more

    @njit(error_model="numpy")
    def multiply(states, panel, width, sums):
        for start in range(0, width, _BLOCK):
            end, member = start + _BLOCK, none
            while member < states.shape[0]:
                some = min(states.shape[0] - member, TOGETHER)
                if some == 4:
                    add_four(states, member, panel, start, end, width, sums)
                elif some == 3:
                    add_three(states, member, panel, start, end, width, sums)
                elif some == 2:
                    add_two(states, member, panel, start, end, width, sums)
                else:
                    add_one(states, member, panel, start, end, width, sums)
                member += some

    return multiply


_add_fp32, _add_bf16 = _multiplier(torch.float32), _multiplier(torch.bfloat16)


@njit(error_model="numpy")
def _round_to_bf16(numbers):
    """Round numbers ``[T, N]`` to the nearest in bfloat16, in place; NaN stays NaN."""
    bits = numbers.view(np.uint32)
    for row in range(numbers.shape[0]):
        for i in range(numbers.shape[1]):
            own = bits[row, i]
            is_nan = numbers[row, i] != numbers[row, i]
            up = np.uint32(0x7FFF) + ((own >> np.uint32(16)) & np.uint32(1))
            own = own | np.uint32(0x400000) if is_nan else own + up
            bits[row, i] = own & np.uint32(0xFFFF0000)


@kept(parallel=True)
def _multiply(address, depth, width, num_outputs, pairs, states, stride, num_rows, products):
    """Multiply rows with weights in panels, by addresses; ``pairs``: they are in bfloat16."""
    rows = carray(_numbers_at(states), (num_rows, stride))
    out = carray(_numbers_at(products), (num_rows, num_outputs))
    num_panels = (num_outputs + OUTPUTS - 1) // OUTPUTS
    panels = carray(_bytes_at(address), (num_panels, depth, _LINE))
    if pairs:
        rounded = np.empty((num_rows, width), np.float32)
        rounded[:] = rows[:, :width]
        _round_to_bf16(rounded)
        rows = rounded
    for number in prange(num_panels):
        # One place for all panels: the loops would be compiled once more for the last one.
        sums = np.empty((num_rows, OUTPUTS), np.float32)
        if pairs:
            _add_bf16(rows, panels[number], width, sums)
            _round_to_bf16(sums)
        else:
            _add_fp32(rows, panels[number], width, sums)
        first = number * OUTPUTS
        for row in range(num_rows):
            for output in range(min(num_outputs - first, OUTPUTS)):
                out[row, first + output] = sums[row, output]
