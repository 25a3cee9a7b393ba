"""The order of a store's places, by which ties are broken and victims are drawn."""

import heapq
from collections.abc import Iterable

from kvpolicy import Block


class Slots:
    """A number for each stored block: a new block takes the lowest number that is free.

    Sets of blocks have no order of their own (that of texts even differs between processes), and
    the authors' code evicts the first place among equals; the numbers are these places.
    """

    def __init__(self) -> None:
        self._slots: dict[Block, int] = {}
        self._free: list[int] = []

    def __getitem__(self, block: Block) -> int:
        return self._slots[block]

    def insert(self, block: Block) -> None:
        """Give a block a number."""
        self._slots[block] = heapq.heappop(self._free) if self._free else len(self._slots)

    def evict(self, block: Block) -> None:
        """Free the number of a block."""
        heapq.heappush(self._free, self._slots.pop(block))

    def stored(self) -> set[Block]:
        """The stored blocks, as a set of its own."""
        return set(self._slots)

    def sorted(self, blocks: Iterable[Block]) -> list[Block]:
        """Blocks by rising number."""
        return sorted(blocks, key=self._slots.__getitem__)
