"""Random numbers that depend on a token and not on when, where or beside what it is asked about."""

import torch
from torch import Tensor

_MASK = 2**32 - 1


def uniform(positions: Tensor, *, seed: int, layer_idx: int) -> Tensor:
    """Draw a number in [0, 1) for every row: a hash of seed, layer, KV head and position.

    A row has the same number at every compaction, in every batch and slot, and on every device,
    which no generator that is called as rows come could promise. For another number at each
    compaction, give another seed, such as a hash of yours and ``seq_len``.

    The hash is C. Wellons' two-round 32-bit integer hash (hash-prospector, 0x21f0aaad,
    0x735a2d97), which needs no 64-bit overflow.

    Args:
        positions: ``[B, H_kv, T]``, int64, as hooks get them.
        seed: From 0 to below 2**32.
        layer_idx: The layer.

    Returns:
        ``[B, H_kv, T]``, float32, multiples of 2**-24.
    """
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    drawn = torch.full_like(heads, seed)
    for counter in (layer_idx, heads, positions):
        drawn = _hash((_hash(drawn) + counter) & _MASK)
    return (drawn >> 8).float() / 2**24


def _hash(x: Tensor) -> Tensor:
    """Mix 32 bits in int64; both factors are below 2**31, so nothing overflows."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
