"""What the eviction of a tier of a store is told."""

from array import array
from random import Random

import attrs

from kvpolicy.block_eviction import CheckedBlockEviction, load_block_eviction
from kvpolicy.engine.reuse.nodes import Node
from kvpolicy.engine.reuse.tier import EvictionChoice, Tier


@attrs.frozen
class Notes(EvictionChoice):
    """Notes for how many blocks it is asked to choose."""

    capacities: list[int] = attrs.field(factory=list)

    def build(self, capacity: int) -> CheckedBlockEviction:
        self.capacities.append(capacity)
        return load_block_eviction("lru", capacity=capacity, rng=Random(0))


def test_an_eviction_is_told_how_many_blocks_of_the_first_size_fit() -> None:
    choice = Notes()
    tier = Tier(100, choice)
    for name, size in ((b"a", 30), (b"b", 10)):
        tier.add(Node(name, None, array("q", [1]), None, None), size)
    assert choice.capacities[-1] == 3
    small = Notes()
    Tier(5, small).add(Node(b"a", None, array("q", [1]), None, None), 30)
    assert small.capacities[-1] == 1
