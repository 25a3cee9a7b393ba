"""Random: keep random rows, the control that every score has to beat."""

import attrs
from attrs.validators import ge, instance_of, le
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.toolkit import uniform

_MOST = 2**32 - 1


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

    Attributes:
        seed: Seed of the hash, below 2**32.
    """

    seed: int = attrs.field(default=0, validator=[instance_of(int), ge(0), le(_MOST)])

    @hookimpl
    def score(self, layer_idx: int, positions: Tensor) -> Tensor:
        """Draw a number in [0, 1) for every row."""
        return uniform(positions, seed=self.seed, layer_idx=layer_idx)
