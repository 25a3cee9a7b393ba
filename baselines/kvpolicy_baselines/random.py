"""Random: keep random rows, the control that every score has to beat."""

import attrs
import torch
from attrs.validators import ge, instance_of, le
from torch import Tensor

from kvpolicy import hookimpl

_MASK = 2**32 - 1


@attrs.define(eq=False, kw_only=True)
class Random:
    """Random: keep random tokens, the control that every score has to beat.

    The score of a token is a hash of the seed, the layer, the KV head and the position, and
    never changes. So the rows that stay are a uniform sample of all tokens so far, not of the
    recent ones, and do not depend on the batch, on slots or on when rows are compacted.
    Sequences with the same seed keep the same positions: for figures, repeat a run with several
    seeds.

    Nothing is protected. ``["random", "protect"]`` is the control for policies that keep sinks
    or a recent window.

    The hash is C. Wellons' two-round 32-bit integer hash (hash-prospector, 0x21f0aaad,
    0x735a2d97), which needs no 64-bit overflow and gives the same numbers on every device.

    Attributes:
        seed: Seed of the hash, below 2**32.
    """

    seed: int = attrs.field(default=0, validator=[instance_of(int), ge(0), le(_MASK)])

    @hookimpl
    def score(self, layer_idx: int, positions: Tensor) -> Tensor:
        """Draw a number in [0, 1) for every row."""
        num_kv_heads = positions.shape[1]
        heads = torch.arange(num_kv_heads, device=positions.device)[:, None]
        drawn = torch.full_like(heads, self.seed)
        for counter in (layer_idx, heads, positions):
            drawn = _hash((_hash(drawn) + counter) & _MASK)
        return (drawn >> 8).float() / 2**24


def _hash(x: Tensor) -> Tensor:
    """Mix 32 bits in int64; both factors are below 2**31, so nothing overflows."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
