"""Products of the queries of a group with rows, and sums of rows, each row being read once.

Bytes take longer to become numbers than numbers take to be multiplied. So numbers of rows are read
into registers, as they are stored, and are multiplied there with several queries, or with the
weights that these give them. What they are added to, the *tile*, stays in registers, too: four sums
for each query. Of integers, what is multiplied are codes; their scales come later, once for a row.

Which forms can be read so, says `can_read`; others become numbers first, see
`kvpolicy.attention.numba_backend.rows`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvpolicy.attention.numba_backend.lanes import (
    BYTES,
    FLOATS,
    HALVES,
    LANES,
    PAIRS,
    SUMS,
    WIDE,
    address,
    fetch,
    fused,
    lanes_type,
    of_bf16,
    of_codes,
    of_fp16,
    of_lower_bf16,
    of_upper_bf16,
    splat,
    sums_of_four,
)
from kvpolicy.attention.numba_backend.rows import BF16, FP16, FP32
from kvpolicy.numba_common import FASTMATH

# Queries that read a row together. Their sums fill the registers of processors with AVX-512; others
# have fewer or shorter ones, and one query has what they hold.
TOGETHER = 4 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 1

_FOUR = 4  # sums of a tile for each query
_LINE = 64  # bytes that a processor reads at once
_AHEAD = 2**14  # bytes by which it is told of rows before they are read
_CACHED = 2**14  # bytes of rows that stay in the first cache while their channels are added

# Forms of weights: bytes with a sign; and the first and the second of two numbers in bfloat16.
SIGNED, FIRST_BF16, SECOND_BF16 = -8, -16, -17

# What is loaded of a form, the bytes of a number, and how numbers are made of it.
_FORMS: dict[int, tuple[Any, int, Callable[..., Any]]] = {
    FP32: (FLOATS, 4, lambda builder, numbers: numbers),
    BF16: (HALVES, 2, of_bf16),
    FP16: (HALVES, 2, of_fp16),
    8: (BYTES, 1, of_codes),
    SIGNED: (BYTES, 1, partial(of_codes, signed=True)),
    FIRST_BF16: (PAIRS, 4, of_lower_bf16),
    SECOND_BF16: (PAIRS, 4, of_upper_bf16),
}


@njit(error_model="numpy")
def rows_ahead(rows):
    """So many rows before one is multiplied, the processor is told of it; rows ``[T, ...]``."""
    return _AHEAD // rows.shape[1]


@njit(error_model="numpy")
def can_read(form, dim):
    """Whether rows of a form with so many channels are read as they are stored."""
    return form == FP32 or (form != 4 and dim % LANES == 0)


def _tile(form, members, columns):
    """Functions on tiles of so many queries, with so many sums each, over rows of a form.

    Returns:
        Intrinsics: zeros; the sums of an array; both products, see there; and what writes a tile.
    """
    size = members * columns
    tile = types.UniTuple(lanes_type, size)
    index = types.intp
    kind, width, numbers = _FORMS[form]

    def load(context, builder, of, place):
        """Numbers of a row in fp32 from a column on."""
        return builder.load(address(context, builder, of, place, FLOATS), align=4)

    def stored(context, builder, of, array, row, column):
        """Those of a row as it is stored."""
        place = array, row, builder.mul(column, column.type(width))
        return numbers(builder, builder.load(address(context, builder, of, place, kind), align=1))

    @intrinsic
    def empty(typingctx):
        """A tile of zeros."""

        def make(context, builder, signature, args):
            return ir.Constant(ir.ArrayType(FLOATS, size), None)

        return tile(), make

    @intrinsic
    def read(typingctx, array, row, column):
        """The tile of an array: some of its rows, from a column on."""

        def make(context, builder, signature, args):
            array, row, column = args
            found = []
            for member in range(members):
                for part in range(columns):
                    place = (
                        array,
                        builder.add(row, row.type(member)),
                        builder.add(column, column.type(part * LANES)),
                    )
                    found.append(load(context, builder, signature.args[0], place))
            return cgutils.pack_array(builder, found)

        return tile(array, index, index), make

    @intrinsic
    def write(typingctx, array, row, column, sums):
        """Write a tile, as it is read."""

        def make(context, builder, signature, args):
            array, row, column, sums = args
            found = iter(cgutils.unpack_tuple(builder, sums, size))
            for member in range(members):
                for part in range(columns):
                    place = (
                        array,
                        builder.add(row, row.type(member)),
                        builder.add(column, column.type(part * LANES)),
                    )
                    at = address(context, builder, signature.args[0], place, FLOATS)
                    builder.store(next(found), at, align=4)
            return context.get_dummy_value()

        return types.void(array, index, index, tile), make

    @intrinsic
    def plus_channels(typingctx, sums, query, member, column, rows, first, second, third, fourth):
        """Add products of some queries and four rows, of channels from one on, lane by lane."""

        def make(context, builder, signature, args):
            sums, query, member, column, rows, *chosen = args
            of = signature.args[4]
            channels = [stored(context, builder, of, rows, row, column) for row in chosen]
            found = []
            for number, total in enumerate(cgutils.unpack_tuple(builder, sums, size)):
                if number % _FOUR == 0:
                    row = builder.add(member, member.type(number // _FOUR))
                    own = load(context, builder, signature.args[1], (query, row, column))
                found.append(fused(builder, total, own, channels[number % _FOUR]))
            return cgutils.pack_array(builder, found)

        arguments = tile, query, index, index, rows, index, index, index, index
        return tile(*arguments), make

    @intrinsic
    def write_logits(typingctx, logits, member, column, sums):
        """Write the sums over lanes of products with four rows, from a column on."""

        def make(context, builder, signature, args):
            logits, member, column, sums = args
            found = cgutils.unpack_tuple(builder, sums, size)
            for number in range(members):
                row = builder.add(member, member.type(number))
                at = address(context, builder, signature.args[0], (logits, row, column), SUMS)
                four = found[number * _FOUR : (number + 1) * _FOUR]
                builder.store(sums_of_four(builder, four), at, align=4)
            return context.get_dummy_value()

        return types.void(logits, index, index, tile), make

    @intrinsic
    def plus_row(typingctx, sums, weights, member, at, rows, row, column):
        """Add channels of a row, from one on, under the weights that some queries give it."""

        def make(context, builder, signature, args):
            sums, weights, member, at, rows, row, column = args
            of = signature.args[4]
            channels = []
            for part in range(columns):
                channel = builder.add(column, column.type(part * LANES))
                channels.append(stored(context, builder, of, rows, row, channel))
            found = []
            for number, total in enumerate(cgutils.unpack_tuple(builder, sums, size)):
                if number % columns == 0:
                    query = builder.add(member, member.type(number // columns))
                    place = weights, query, at
                    element = ir.FloatType()
                    own = address(context, builder, signature.args[1], place, element)
                    weight = splat(builder, builder.load(own))
                found.append(fused(builder, total, weight, channels[number % columns]))
            return cgutils.pack_array(builder, found)

        return tile(tile, weights, index, index, rows, index, index), make

    return empty, read, write, plus_channels, write_logits, plus_row


def tile_of(form, members):
    """The functions of `_tile`, with as many sums for each query as are read at once."""
    return _tile(form, members, _FOUR)


def _loops(form, members):
    """What `multiply` and `add` do for so many queries, from one on."""
    empty, read, write, plus_channels, write_logits, plus_row = _tile(form, members, _FOUR)
    _, read_narrow, write_narrow, _, _, plus_narrow = _tile(form, members, 1)

    @njit(error_model="numpy")
    def multiply_some(query, member, rows, whole, ahead, first, logits):
        last = rows.shape[0] - 1
        reach = 0 if member or not ahead else _FOUR * rows.shape[1]
        for row in range(0, last + 1, _FOUR):
            for i in range(0, reach, _LINE):
                fetch(rows, row + ahead, i)
            second, third, fourth = min(row + 1, last), min(row + 2, last), min(row + 3, last)
            sums = empty()
            for i in range(0, whole, LANES):
                sums = plus_channels(sums, query, member, i, rows, row, second, third, fourth)
            write_logits(logits, member, first + row, sums)

    @njit(error_model="numpy")
    def add_some(weights, member, rows, whole, ahead, first, output):
        num_rows = rows.shape[0]
        wide = whole - whole % WIDE
        for i in range(0, wide, WIDE):
            reach = 0 if member or i or not ahead else max(rows.shape[1] - _LINE, 0) + 1
            sums = read(output, member, i)
            for row in range(num_rows):
                for at in range(0, reach, _LINE):
                    fetch(rows, row + ahead, at)
                sums = plus_row(sums, weights, member, first + row, rows, row, i)
            write(output, member, i, sums)
        for i in range(wide, whole, LANES):
            sums = read_narrow(output, member, i)
            for row in range(num_rows):
                sums = plus_narrow(sums, weights, member, first + row, rows, row, i)
            write_narrow(output, member, i, sums)

    return multiply_some, add_some


def of_form(form):
    """What `multiply` and `add` do with rows of a form, whose channels are whole vectors.

    Returns:
        Functions of queries ``[G, D]``, or weights; of rows ``[T, ...]``; of the rows by which the
        processor is told of one before; of the first row's column; and of what receives sums.
    """
    multiply_one, add_one = _loops(form, 1)
    multiply_two, add_two = _loops(form, 2)
    multiply_three, add_three = _loops(form, 3)
    multiply_four, add_four = _loops(form, 4)
    none = np.int64(0)  # for a literal Numba would compile the loops once more

    @njit(error_model="numpy")
    def multiply_all(query, rows, ahead, first, logits):
        whole, member = query.shape[1] - query.shape[1] % LANES, none
        while member < query.shape[0]:
            some = min(query.shape[0] - member, TOGETHER)
            if some == 4:
                multiply_four(query, member, rows, whole, ahead, first, logits)
            elif some == 3:
                multiply_three(query, member, rows, whole, ahead, first, logits)
            elif some == 2:
                multiply_two(query, member, rows, whole, ahead, first, logits)
            else:
                multiply_one(query, member, rows, whole, ahead, first, logits)
            member += some

    @njit(error_model="numpy")
    def add_all(weights, rows, ahead, first, output):
        whole, member = output.shape[1] - output.shape[1] % LANES, none
        while member < output.shape[0]:
            some = min(output.shape[0] - member, TOGETHER)
            if some == 4:
                add_four(weights, member, rows, whole, ahead, first, output)
            elif some == 3:
                add_three(weights, member, rows, whole, ahead, first, output)
            elif some == 2:
                add_two(weights, member, rows, whole, ahead, first, output)
            else:
                add_one(weights, member, rows, whole, ahead, first, output)
            member += some

    return multiply_all, add_all


_multiply_fp32, _add_fp32 = of_form(FP32)
_multiply_bf16, _add_bf16 = of_form(BF16)
_multiply_fp16, _add_fp16 = of_form(FP16)
_multiply_codes, _add_codes = of_form(8)


@njit(fastmath=FASTMATH, error_model="numpy")
def multiply(query, rows, form, ahead, first, logits):
    """Logits of the queries of a group for rows; of integers, products with their codes.

    Args:
        query: ``[G, D]``.
        rows: Bytes of rows in a form that `can_read`, ``[T, ...]``.
        form: Their form.
        ahead: So many rows before the processor is told of one; 0: they are in its cache.
        first: Column of the first row's logits.
        logits: Receives them, ``[G, >= first + T + 3]``: four are written at once, and there are up
            to three numbers of no meaning behind the last one.
    """
    if form == FP32:
        _multiply_fp32(query, rows, ahead, first, logits)
    elif form == BF16:
        _multiply_bf16(query, rows, ahead, first, logits)
    elif form == FP16:
        _multiply_fp16(query, rows, ahead, first, logits)
    else:
        _multiply_codes(query, rows, ahead, first, logits)
    (members, dim), num_rows = query.shape, rows.shape[0]
    whole = dim - dim % LANES
    if whole < dim and num_rows:
        numbers = rows.view(np.float32)
        for member in range(members):
            for row in range(num_rows):
                number = np.float32(0)
                for i in range(whole, dim):
                    number += query[member, i] * numbers[row, i]
                logits[member, first + row] += number


@njit(fastmath=FASTMATH, error_model="numpy")
def add(weights, rows, form, ahead, first, output):
    """Add rows under weights; of integers, their codes.

    Args:
        weights: ``[G, ...]``.
        rows: Bytes of rows in a form that `can_read`, ``[T, ...]``.
        form: Their form.
        ahead: See `multiply`.
        first: Column of the first row's weights.
        output: What is added to, ``[G, D]``.
    """
    (members, dim), (num_rows, width) = output.shape, rows.shape
    whole = dim - dim % LANES
    several = max(num_rows, 1) if dim <= WIDE else max(_CACHED // width, LANES)
    for start in range(0, num_rows, several):
        some = rows[start : start + several]
        if form == FP32:
            _add_fp32(weights, some, ahead, first + start, output)
        elif form == BF16:
            _add_bf16(weights, some, ahead, first + start, output)
        elif form == FP16:
            _add_fp16(weights, some, ahead, first + start, output)
        else:
            _add_codes(weights, some, ahead, first + start, output)
    if whole < dim and num_rows:
        numbers = rows.view(np.float32)
        for member in range(members):
            for row in range(num_rows):
                weight = weights[member, first + row]
                for i in range(whole, dim):
                    output[member, i] += weight * numbers[row, i]
