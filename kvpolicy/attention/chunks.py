"""Into how many chunks Triton's attention cuts a slab; for those who count, without Triton."""

BLOCK = 64  # rows attended to at once
DEFAULT_PROCESSORS = 132  # of an H100
_LONGEST_CHUNK = 2048  # so that a long sequence among short ones does not run alone


def chunks_of(
    capacity: int, programs: int, processors: int, wanted: int | None = None
) -> tuple[int, int]:
    """Chunks that a slab is cut into, and rows of each: programs for two per processor, not more.

    One chunk is attended to by one kernel. Several need a second one, and keep what they have
    found in memory for it.

    Args:
        capacity: Rows of a slab.
        programs: Programs of one chunk: slots times KV heads.
        processors: Multiprocessors of the GPU.
        wanted: Chunks to cut a slab into; ``None``: chosen.
    """
    if wanted is None:
        most = max(1, capacity // (2 * BLOCK))
        wanted = min(most, max(1, 2 * processors // programs))
        wanted = max(wanted, -(-capacity // _LONGEST_CHUNK))
    blocks = -(-capacity // BLOCK)
    length = -(-blocks // wanted) * BLOCK
    return -(-capacity // length), length
