"""Evictions that follow predictions, or the past, without a guard."""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Set
from random import Random
from typing import Protocol

import attrs

from kvpolicy import Block, BlockEviction
from kvpolicy_plugins.guard.predictors import Predictor, as_predictor
from kvpolicy_plugins.guard.slots import Slots, SlotSet

_SPARE_ENTRIES = 64
_NEVER = (0.0, -1)


@attrs.define(eq=False, kw_only=True)
class LRU:
    """Evict the block whose last request is longest ago."""

    _capacity: int
    _rng: Random
    # The number of the last request for each stored block, the oldest first.
    _order: OrderedDict[Block, int] = attrs.field(factory=OrderedDict, init=False)
    _num_requests: int = attrs.field(default=0, init=False)

    def hit(self, block: Block) -> None:
        """The block becomes the newest."""
        self._order.move_to_end(block)
        self._touch(block)

    def insert(self, block: Block) -> None:
        """The block becomes the newest."""
        self._touch(block)

    def choose(self, wanted: Block, evictable: Set[Block]) -> Block:
        """The oldest that may leave."""
        # The oldest blocks may all be held back: a walk past them is not worth more steps than to
        # look at each block that may leave.
        for block in itertools.islice(self._order, len(evictable)):
            if block in evictable:
                return block
        return min(evictable, key=self._order.__getitem__)

    def evict(self, block: Block) -> None:
        """Forget it."""
        del self._order[block]

    def _touch(self, block: Block) -> None:
        self._num_requests += 1
        self._order[block] = self._num_requests


class Base(BlockEviction, Protocol):
    """An eviction that others are built around: it can be told what must stay for a while."""

    def protect(self, block: Block, /) -> None:
        """Choose this stored block only if no other may leave."""

    def unprotect_all(self) -> None:
        """Choose among all blocks again."""


@attrs.define(eq=False, kw_only=True)
class BlindOracle:
    """Evict the block with the latest predicted request: optimal where predictions are exact.

    Predictions are made when a block is asked for. Knobs:

    Attributes:
        predictor: ``"popu"``, ``"pleco"``, ``"recency"`` or ``"learned"``; in Python also a
            `Predictor` that gives times.
    """

    predictor: str | Predictor = "popu"
    _capacity: int
    _rng: Random
    _predictor: Predictor = attrs.field(init=False)
    _slots: Slots = attrs.field(factory=Slots, init=False)
    # The newest request of each stored block: its time, and its number.
    _newest: dict[Block, tuple[float, int]] = attrs.field(factory=dict, init=False)
    # Latest time first, then lowest slot. Entries of older requests, and of protected blocks, are
    # dropped when they come up.
    _ranked: list[tuple[float, int, int, Block]] = attrs.field(factory=list, init=False)
    _protected: set[Block] = attrs.field(factory=set, init=False)
    _num_requests: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._predictor = as_predictor(self.predictor)
        if self._predictor.gives_labels:
            msg = "its predictor gives labels and no times; follow labels with LRB"
            raise ValueError(msg)

    def hit(self, block: Block) -> None:
        """Predict again."""
        self._predict(block)

    def insert(self, block: Block) -> None:
        """Predict."""
        self._slots.insert(block)
        self._predict(block)

    def choose(self, wanted: Block, evictable: Set[Block]) -> Block:
        """The block that is predicted latest; of equal ones that in the first place."""
        skipped: list[tuple[float, int, int, Block]] = []
        victim: tuple[Block] | None = None
        # Blocks that are held back may all rank high: to skip them is not worth more steps than to
        # look at each block that may leave.
        while self._ranked and victim is None and len(skipped) <= len(evictable):
            _, _, number, block = self._ranked[0]
            if block in self._protected or self._newest.get(block, _NEVER)[1] != number:
                heapq.heappop(self._ranked)
            elif block in evictable:
                victim = (block,)
            else:
                skipped.append(heapq.heappop(self._ranked))
        for entry in skipped:
            heapq.heappush(self._ranked, entry)
        return victim[0] if victim else min(evictable, key=self._rank)

    def evict(self, block: Block) -> None:
        """Forget it."""
        self._slots.evict(block)
        self._protected.discard(block)
        del self._newest[block]

    def protect(self, block: Block) -> None:
        """Rank it behind all others."""
        self._protected.add(block)

    def unprotect_all(self) -> None:
        """Rank all blocks by predictions alone."""
        self._protected.clear()
        self._rank_all()

    def _predict(self, block: Block) -> None:
        time = self._predictor.predict(block)
        if math.isnan(time):
            msg = f"the predictor answered {time} for block {block!r:.60}; a time is a number"
            raise ValueError(msg)
        self._num_requests += 1
        self._newest[block] = time, self._num_requests
        if len(self._ranked) > 2 * len(self._newest) + _SPARE_ENTRIES:
            self._rank_all()
        else:
            heapq.heappush(self._ranked, (-time, self._slots[block], self._num_requests, block))

    def _rank_all(self) -> None:
        newest = self._newest.items()
        self._ranked = [(-t, self._slots[b], number, b) for b, (t, number) in newest]
        heapq.heapify(self._ranked)

    def _rank(self, block: Block) -> tuple[bool, float, int]:
        return block in self._protected, -self._newest[block][0], self._slots[block]


@attrs.define(eq=False, kw_only=True)
class LRB:
    """Evict a random block of label 1, or any random one if there is none.

    Attributes:
        predictor: A `Predictor` that gives labels.
    """

    predictor: Predictor
    _capacity: int
    _rng: Random
    _slots: Slots = attrs.field(factory=Slots, init=False)
    _labels: dict[Block, float] = attrs.field(factory=dict, init=False)
    # Without the protected ones: all, and those of label 1.
    _unprotected: SlotSet = attrs.field(init=False)
    _labelled: SlotSet = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._unprotected, self._labelled = SlotSet(self._slots), SlotSet(self._slots)

    def hit(self, block: Block) -> None:
        """Predict again."""
        self._predict(block)

    def insert(self, block: Block) -> None:
        """Predict."""
        self._slots.insert(block)
        self._unprotected.add(block)
        self._predict(block)

    def choose(self, wanted: Block, evictable: Set[Block]) -> Block:
        """A random block of label 1, if there is one."""
        for blocks in (self._labelled, self._unprotected):
            drawn = blocks.draw(self._rng, evictable)
            if drawn is not None:
                return drawn[0]
        protected = self._slots.sorted(evictable)
        labelled = [block for block in protected if self._labels[block] == 1]
        return self._rng.choice(labelled or protected)

    def evict(self, block: Block) -> None:
        """Forget it."""
        self.protect(block)
        self._slots.evict(block)
        del self._labels[block]

    def protect(self, block: Block) -> None:
        """Leave it out of the draws."""
        self._unprotected.remove(block)
        self._labelled.remove(block)

    def unprotect_all(self) -> None:
        """Draw from all blocks again."""
        self._unprotected.fill()
        self._labelled.fill({block for block, label in self._labels.items() if label == 1})

    def _predict(self, block: Block) -> None:
        self._labels[block] = self.predictor.predict(block)
        if self._labels[block] == 1 and block in self._unprotected:
            self._labelled.add(block)
        else:
            self._labelled.remove(block)


def following(predictor: str | Predictor, *, capacity: int, rng: Random) -> Base:
    """The eviction that follows a predictor: `BlindOracle` for times, `LRB` for labels."""
    built = as_predictor(predictor)
    base = LRB if built.gives_labels else BlindOracle
    return base(predictor=built, capacity=capacity, rng=rng)
