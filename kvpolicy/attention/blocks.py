"""Queries in blocks, so that no tensor of all weights, or of a mask for all of them, is made."""

from collections.abc import Iterator

import torch

# The most bytes of the weights of a block in fp32; one query is a block at least. On a CPU a block
# stays in its caches; on a GPU large blocks mean few launches.
BLOCK_BYTES = 8 << 20
BLOCK_BYTES_ON_GPU = 256 << 20


def blocks(length: int, per_query: int, device: torch.device) -> Iterator[slice]:
    """Blocks of queries whose weights are made at once.

    Args:
        length: Queries.
        per_query: Weights of each, of all sequences and heads.
        device: Where they are made.
    """
    num_bytes = BLOCK_BYTES if device.type == "cpu" else BLOCK_BYTES_ON_GPU
    block = max(1, num_bytes // (4 * per_query))
    for start in range(0, length, block):
        yield slice(start, min(start + block, length))
