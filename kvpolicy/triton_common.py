"""What Triton kernels of several packages share: addresses of rows, and products of matrices.

Importing it needs the extra ``kernels``.
"""

import triton
import triton.language as tl
from torch import Tensor

LEAST_OF_DOT = 16  # `tl.dot` takes no smaller matrices
_MOST_AT_ONCE = 64
# Bytes of the numbers that are read at once; with those that are copied ahead, and with what they
# become in registers, three programs find room on a multiprocessor, and one on that of any card.
_BYTES_AT_ONCE = 16 << 10

# Whether kernels run in Triton's interpreter, on a CPU (TRITON_INTERPRET=1).
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right):
    """Product of two matrices, in fp32; tensor cores multiply 16-bit types."""
    if INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
        product = tl.dot(left.to(tl.float32), right.to(tl.float32))
    else:
        product = tl.dot(left, right, input_precision="ieee")
    return product.to(tl.float32)


@triton.jit
def rounded(numbers, kind: tl.constexpr):
    """Numbers in fp32, rounded to another precision and back."""
    if INTERPRETED and kind == tl.bfloat16:  # the interpreter cuts bits off
        bits = numbers.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        numbers = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return numbers.to(kind).to(tl.float32)


@triton.jit
def row_start(slot, head, row, slot_stride, head_stride, row_stride):
    """Elements from the start of a tensor to a row of a slot and KV head.

    Kernels address rows through this function only, so that a table of rows needs one change.
    What lies within one slot is counted in 32 bits, the slots in 64.
    """
    return slot.to(tl.int64) * slot_stride + head * head_stride + row * row_stride


def row_strides(slab: Tensor) -> tuple[int, int, int]:
    """Strides of slot, KV head and row of a slab ``[S, H_kv, R]`` or ``[S, H_kv, R, D]``."""
    assert slab.dim() == 3 or slab.stride(3) == 1, "the numbers of one row lie side by side"
    return slab.stride(0), slab.stride(1), slab.stride(2)


def power_of_2(size: int) -> int:
    """The least power of 2 that is not below a size: blocks of Triton have no other sizes."""
    return int(triton.next_power_of_2(size))


def rows_at_once(dim: int, num_bytes: int) -> int:
    """Rows, or queries, that a program multiplies at once.

    Args:
        dim: Numbers of each.
        num_bytes: Bytes of a number.
    """
    row_bytes = max(power_of_2(dim), LEAST_OF_DOT) * num_bytes
    # Products of 32 bits are made without tensor cores, in registers.
    smaller = num_bytes // 2
    return max(min(_BYTES_AT_ONCE // row_bytes, _MOST_AT_ONCE) // smaller, LEAST_OF_DOT)
