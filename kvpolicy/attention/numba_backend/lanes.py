"""Several numbers at once in Numba: a vector of LLVM, for any processor that it has code for.

Loops over the channels of a head are short, and how long they are is not known when they are
compiled: what the compiler makes of them spends more on the ends of loops than on numbers. These
functions say which numbers are read and added together. A processor with shorter vectors takes
several for one.

They are called from compiled functions only. Arrays have two axes, the second one contiguous, and
indices are not checked.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16
#: Numbers of several vectors: a loop over these has a known end, and the compiler writes it out.
WIDE = 4 * LANES

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
HALVES, BYTES = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(8), LANES)
PAIRS, SUMS = _INTS, ir.VectorType(_FLOAT, 4)


class _Lanes(types.Type):
    """`LANES` numbers in fp32."""

    def __init__(self) -> None:
        super().__init__(name=f"Lanes({LANES})")


lanes_type = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, FLOATS)


def address(context, builder, kind, place, element):
    """The address of an element of an array of some type; ``place``: array, row, column."""
    array, row, column = place
    array = context.make_array(kind)(context, builder, array)
    stride = builder.extract_value(array.strides, 0)
    size = stride.type(kind.dtype.bitwidth // 8)
    offset = builder.add(builder.mul(row, stride), builder.mul(column, size))
    return cgutils.pointer_add(builder, array.data, offset, ir.PointerType(element))


def _at(context, builder, signature, args, element):
    """The address of an array's element, by the first three arguments: array, row, column."""
    return address(context, builder, signature.args[0], args[:3], element)


def _read(context, builder, signature, args, element, align):
    return builder.load(_at(context, builder, signature, args, element), align=align)


def splat(builder, number):
    """A vector of one number."""
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * LANES))


def _picked(builder, one, other, lanes):
    """Some lanes of two vectors, those of the second one counted on from the first's."""
    return builder.shuffle_vector(
        one, other, ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes))
    )


@intrinsic
def zeros(typingctx):
    """A vector of zeros."""

    def make(context, builder, signature, args):
        return ir.Constant(FLOATS, [0.0] * LANES)

    return lanes_type(), make


@intrinsic
def read(typingctx, array, row, column):
    """Numbers from a column on."""

    def make(context, builder, signature, args):
        return _read(context, builder, signature, args, FLOATS, 4)

    return lanes_type(array, types.intp, types.intp), make


@intrinsic
def fetch(typingctx, array, row, column):
    """Have the processor read a line of its cache, which is read later; a row may be too far."""

    def make(context, builder, signature, args):
        address = _at(context, builder, signature, args, ir.IntType(8))
        kinds = [address.type, _INT, _INT, _INT]
        kind = ir.FunctionType(ir.VoidType(), kinds)
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(call, [address, _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), make


@intrinsic
def write(typingctx, array, row, column, lanes):
    """Write numbers from a column on."""

    def make(context, builder, signature, args):
        builder.store(args[3], _at(context, builder, signature, args, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, lanes_type), make


def of_codes(builder, codes, signed=False):
    """Whole numbers of bytes."""
    wide = builder.sext(codes, _INTS) if signed else builder.zext(codes, _INTS)
    return builder.sitofp(wide, FLOATS)


def _codes(part):
    """A function that reads bytes as numbers, having done something to the bytes."""

    @intrinsic
    def read_codes(typingctx, array, row, column):
        def make(context, builder, signature, args):
            codes = part(builder, _read(context, builder, signature, args, BYTES, 1))
            return of_codes(builder, codes)

        return lanes_type(array, types.intp, types.intp), make

    return read_codes


#: Numbers of bytes from a column on; those of their lower and of their upper four bits.
read_bytes = _codes(lambda builder, codes: codes)
read_lower = _codes(lambda builder, codes: builder.and_(codes, ir.Constant(BYTES, [15] * LANES)))
read_upper = _codes(lambda builder, codes: builder.lshr(codes, ir.Constant(BYTES, [4] * LANES)))


def of_bf16(builder, halves, integers=_INTS, floats=FLOATS):
    """bf16 are the upper half of a number in fp32."""
    wide = builder.zext(halves, integers)
    return builder.bitcast(builder.shl(wide, _constant(integers, 16)), floats)


def of_lower_bf16(builder, pairs):
    """Numbers of which the bf16 is the lower half of an integer."""
    return builder.bitcast(builder.shl(pairs, _constant(PAIRS, 16)), FLOATS)


def of_upper_bf16(builder, pairs):
    """Those of which it is the upper half."""
    return builder.bitcast(builder.and_(pairs, _constant(PAIRS, 0xFFFF0000)), FLOATS)


def of_fp16(builder, halves, integers=_INTS, floats=FLOATS):
    """fp16 have 5 bits for the exponent, which counts from 15, and fp32 8, from 127.

    So their bits, moved, are a number that is 2^112 times too small; and the largest exponent
    stands for infinity and for what is no number. In integers, since not all processors convert.
    """
    wide = builder.zext(halves, integers)
    moved = builder.shl(builder.and_(wide, _constant(integers, 0x7FFF)), _constant(integers, 13))
    finite = builder.fmul(builder.bitcast(moved, floats), _constant(floats, 2.0**112))
    ends = builder.icmp_unsigned(">=", moved, _constant(integers, 0x7C00 << 13))
    number = builder.select(
        ends,
        builder.or_(moved, _constant(integers, 0x7F800000)),
        builder.bitcast(finite, integers),
    )
    sign = builder.shl(builder.and_(wide, _constant(integers, 0x8000)), _constant(integers, 16))
    return builder.bitcast(builder.or_(number, sign), floats)


def _constant(kind, number):
    """A number, or a vector of one number."""
    return ir.Constant(kind, [number] * LANES if isinstance(kind, ir.VectorType) else number)


def _halves(widen):
    """Functions that read numbers of 16 bits from a column of bytes on: one, and `LANES`."""

    @intrinsic
    def read_one(typingctx, array, row, column):
        def make(context, builder, signature, args):
            half = _read(context, builder, signature, args, ir.IntType(16), 1)
            return widen(builder, half, _INT, _FLOAT)

        return types.float32(array, types.intp, types.intp), make

    @intrinsic
    def read_several(typingctx, array, row, column):
        def make(context, builder, signature, args):
            halves = _read(context, builder, signature, args, HALVES, 1)
            return widen(builder, halves, _INTS, FLOATS)

        return lanes_type(array, types.intp, types.intp), make

    return read_one, read_several


#: The number whose bf16, or fp16, are two bytes from a column on; and as many as there are lanes.
read_bf16, read_several_bf16 = _halves(of_bf16)
read_fp16, read_several_fp16 = _halves(of_fp16)


def fused(builder, lanes, one, other):
    """``lanes + one * other``, which may be rounded once."""
    product = builder.fmul(one, other, flags=("contract",))
    return builder.fadd(lanes, product, flags=("contract",))


@intrinsic
def plus_product(typingctx, lanes, one, other):
    """``lanes + one * other``."""

    def make(context, builder, signature, args):
        return fused(builder, *args)

    return lanes_type(lanes_type, lanes_type, lanes_type), make


@intrinsic
def repeated(typingctx, number):
    """A vector of one number."""

    def make(context, builder, signature, args):
        return splat(builder, args[0])

    return lanes_type(types.float32), make


@intrinsic
def plus(typingctx, one, other):
    """The sums of two vectors, lane by lane."""

    def make(context, builder, signature, args):
        return builder.fadd(*args)

    return lanes_type(lanes_type, lanes_type), make


@intrinsic
def larger(typingctx, one, other):
    """The larger number of each lane; if one is NaN, the second one."""

    def make(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return lanes_type(lanes_type, lanes_type), make


@intrinsic
def write_sums(typingctx, array, row, column, first, second, third, fourth):
    """Write the sums over the lanes of four vectors, from a column on."""

    def make(context, builder, signature, args):
        sums = sums_of_four(builder, args[3:])
        builder.store(sums, _at(context, builder, signature, args, SUMS), align=4)
        return context.get_dummy_value()

    index, lanes = types.intp, lanes_type
    return types.void(array, index, index, lanes, lanes, lanes, lanes), make


def sums_of_four(builder, found):
    """The sums over the lanes of four vectors, as a vector of four numbers."""
    size = LANES
    # Halves are added until a vector has four parts of LANES / 4 lanes, one of each sum.
    while len(found) > 1:
        size //= 2
        parts = range(0, LANES, 2 * size)
        lower = [lane for part in parts for lane in range(part, part + size)]
        lower += [LANES + lane for lane in lower]
        upper = [lane + size for lane in lower]
        found = [
            builder.fadd(_picked(builder, *pair, lower), _picked(builder, *pair, upper))
            for pair in zip(found[::2], found[1::2], strict=True)
        ]
    (sums,) = found
    while size > 1:
        size //= 2
        moved = _picked(builder, sums, sums, [lane ^ size for lane in range(LANES)])
        sums = builder.fadd(sums, moved)
    return _picked(builder, sums, sums, range(0, LANES, LANES // 4))
