"""Which rows of a slot a decode step attends to, read where the kernels run."""

import triton
import triton.language as tl


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
