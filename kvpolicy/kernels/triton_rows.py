"""Where a row lies in a slab: the one place that Triton kernels ask."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_start(slot, head, row, slot_stride, head_stride, row_stride):
    """Elements from the start of a tensor to a row of a slot and KV head.

    Kernels address rows through this function only, so that a table of rows needs one change.
    What lies within one slot is counted in 32 bits, the slots in 64.
    """
    return slot.to(tl.int64) * slot_stride + head * head_stride + row * row_stride


@triton.jit
def num_held(rows, slot, head, live, rows_slot, CAPACITY: tl.constexpr):
    """Rows of a slot and KV head to attend to, the new one included; 0 where no sequence is."""
    before = tl.load(rows + slot * rows_slot + head).to(tl.int32)
    return tl.where(tl.load(live + slot) != 0, tl.minimum(before + 1, CAPACITY), 0)


@triton.jit
def segment(bounds, slot, head, bounds_slot, held, CAPACITY: tl.constexpr):
    """Place of the first row of a KV head in the pool of its slot, and the rows to attend to.

    Kernels address such rows as those of head 0 of the slot: heads lie side by side in their pool.
    What is held is what `num_held` counts, the rows of a head in the mean.
    """
    at = bounds + slot.to(tl.int64) * bounds_slot + head
    first, end = tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32)
    return first, tl.where(held > 0, end - first - CAPACITY + held, 0)


def row_strides(slab: Tensor) -> tuple[int, int, int]:
    """Strides of slot, KV head and row of a slab ``[S, H_kv, R]`` or ``[S, H_kv, R, D]``."""
    assert slab.dim() == 3 or slab.stride(3) == 1, "the numbers of one row lie side by side"
    return slab.stride(0), slab.stride(1), slab.stride(2)


def power_of_2(size: int) -> int:
    """The least power of 2 that is not below a size: blocks of Triton have no other sizes."""
    return int(triton.next_power_of_2(size))
