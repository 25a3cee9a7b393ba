"""The order of a store's places, by which ties are broken and victims are drawn."""

import heapq
from collections.abc import Iterable, Set
from random import Random

from kvpolicy import Block

_MOST_DRAWS = 8


class Slots:
    """A number for each stored block: a new block takes the lowest number that is free.

    Sets of blocks have no order of their own (that of texts even differs between processes), and
    the authors' code evicts the first place among equals; the numbers are these places.
    """

    def __init__(self) -> None:
        self._slots: dict[Block, int] = {}
        self._blocks: list[Block] = []  # by number; what has left stays until its place is taken
        self._free: list[int] = []

    def __getitem__(self, block: Block) -> int:
        return self._slots[block]

    def __len__(self) -> int:
        """Places that are taken, or were."""
        return len(self._blocks)

    def block(self, slot: int) -> Block:
        """The block in a place that is taken."""
        return self._blocks[slot]

    def insert(self, block: Block) -> None:
        """Give a block a number."""
        if self._free:
            slot = heapq.heappop(self._free)
            self._blocks[slot] = block
        else:
            slot = len(self._blocks)
            self._blocks.append(block)
        self._slots[block] = slot

    def evict(self, block: Block) -> None:
        """Free the number of a block."""
        heapq.heappush(self._free, self._slots.pop(block))

    def stored(self) -> set[Block]:
        """The stored blocks, as a set of its own."""
        return set(self._slots)

    def sorted(self, blocks: Iterable[Block]) -> list[Block]:
        """Blocks by rising number."""
        return sorted(blocks, key=self._slots.__getitem__)


class SlotSet:
    """Some of the stored blocks, of which random ones are drawn as from a list in slot order.

    The list would be made anew for each draw; a Fenwick tree finds its ``n``-th element in ``log2``
    of the places. ``_counts[i]`` is the number of members in the ``i & -i`` places before place
    ``i``, and there are counts for a power of two places.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._members: set[Block] = set()
        self._counts = [0, 0]

    def __contains__(self, block: object) -> bool:
        return block in self._members

    def __len__(self) -> int:
        return len(self._members)

    def add(self, block: Block) -> None:
        """Add a stored block, unless it is a member."""
        if block not in self._members:
            while self._slots[block] >= len(self._counts) - 1:
                self._counts += [0] * (len(self._counts) - 1)
                self._counts[-1] = len(self._members)
            self._members.add(block)
            self._count(self._slots[block], 1)

    def remove(self, block: Block) -> None:
        """Remove a block that is still stored, if it is a member."""
        if block in self._members:
            self._members.remove(block)
            self._count(self._slots[block], -1)

    def fill(self, blocks: Set[Block] | None = None) -> None:
        """Hold these stored blocks and no others; all stored ones by default."""
        self._members = self._slots.stored() if blocks is None else set(blocks)
        size = 1 << (max(1, len(self._slots)) - 1).bit_length()
        self._counts = [0] * (size + 1)
        for block in self._members:
            self._counts[self._slots[block] + 1] = 1
        for end in range(1, size):
            self._counts[end + (end & -end)] += self._counts[end]

    def draw(self, rng: Random, evictable: Set[Block]) -> tuple[Block] | None:
        """A random member that may leave, each with the same probability; none if there is none.

        Where every member may leave, the random numbers are those of one draw from a list.
        """
        # Most stores let most blocks leave, so one of the first draws may. Where few may, they are
        # looked at instead.
        for _ in range(_MOST_DRAWS if self._members else 0):
            block = self._slots.block(self._nth(rng.randrange(len(self._members))))
            if block in evictable:
                return (block,)
        few, many = sorted((self._members, evictable), key=len)
        both = self._slots.sorted(block for block in few if block in many)
        return (rng.choice(both),) if both else None

    def _count(self, slot: int, change: int) -> None:
        end = slot + 1
        while end < len(self._counts):
            self._counts[end] += change
            end += end & -end

    def _nth(self, n: int) -> int:
        """The place of the ``n``-th member, from 0."""
        slot, width = 0, len(self._counts) - 1
        while width:
            if slot + width < len(self._counts) and self._counts[slot + width] <= n:
                slot += width
                n -= self._counts[slot]
            width //= 2
        return slot
