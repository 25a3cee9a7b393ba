"""A tier of a store, memory or disk: which nodes are there, in how many bytes, and which leave."""

from collections import Counter
from collections.abc import Callable, Set
from random import Random
from typing import Any

import attrs

from kvpolicy.block_eviction import CheckedBlockEviction, load_block_eviction
from kvpolicy.engine.reuse.nodes import Node


@attrs.frozen
class EvictionChoice:
    """Which eviction decides what leaves.

    Attributes:
        name: Its name, see `kvpolicy.load_block_eviction`.
        knobs: Its knobs.
        seed: Seed of its random numbers.
    """

    name: str = "lru"
    knobs: dict[str, Any] = attrs.field(factory=dict)
    seed: int = 0

    def build(self, capacity: int) -> CheckedBlockEviction:
        """The eviction of a store of so many blocks; raises as `load_block_eviction` does."""
        return load_block_eviction(
            self.name, capacity=capacity, rng=Random(self.seed), **self.knobs
        )


class Tier:
    """Nodes in one place, never more than a number of bytes; those that others continue stay.

    Attributes:
        capacity: The most bytes.
        num_bytes: Bytes of the nodes now.
        num_evictions: Nodes that have left to make room.
    """

    def __init__(self, capacity: int, eviction: EvictionChoice) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        self.num_evictions = 0
        self._choice = eviction
        self._eviction = eviction.build(1)  # refuses wrong knobs now
        self._is_sized = False
        self._sizes: dict[bytes, int] = {}
        self._children: Counter[bytes] = Counter()
        self._leaves: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, node: Node) -> bool:
        return node.key in self._sizes

    def clear(self) -> None:
        """Count all nodes as gone, without asking or telling the eviction."""
        self.num_bytes = 0
        self._sizes.clear()
        self._children.clear()
        self._leaves.clear()

    def hit(self, node: Node) -> None:
        """A request has found a node."""
        self._eviction.hit(node.key)

    def make_room(
        self, wanted: bytes, size: int, in_use: Set[bytes], leave: Callable[[bytes], None]
    ) -> bool:
        """Have nodes leave until so many bytes more fit.

        Args:
            wanted: The key that room is made for.
            size: Its bytes.
            in_use: Keys that must stay.
            leave: Takes the key of a node that leaves; it calls `remove`.

        Returns:
            Whether they fit. If they never can, nothing leaves.
        """
        if size > self.capacity:
            return False
        while self.num_bytes + size > self.capacity:
            held_back = self._leaves & in_use
            self._leaves -= held_back
            victim = self._eviction.choose(wanted, self._leaves) if self._leaves else None
            self._leaves |= held_back
            if victim is None:
                return False
            self.num_evictions += 1
            leave(victim)  # type: ignore[arg-type]
        return True

    def add(self, node: Node, size: int) -> None:
        """Count a node for which there is room."""
        if not self._is_sized:
            # How many blocks fit is not known before: this is an estimate, for what needs one.
            self._eviction = self._choice.build(max(self.capacity // max(size, 1), 1))
            self._is_sized = True
        self._eviction.insert(node.key)
        self._sizes[node.key] = size
        self.num_bytes += size
        if not self._children[node.key]:
            self._leaves.add(node.key)
        if node.parent is not None:
            self._children[node.parent.key] += 1
            self._leaves.discard(node.parent.key)

    def remove(self, node: Node) -> None:
        """Count a node as gone."""
        self._eviction.evict(node.key)
        self.num_bytes -= self._sizes.pop(node.key)
        self._leaves.discard(node.key)
        parent = node.parent
        if parent is not None:
            self._children[parent.key] -= 1
            if not self._children[parent.key]:
                del self._children[parent.key]
                if parent.key in self._sizes:
                    self._leaves.add(parent.key)
