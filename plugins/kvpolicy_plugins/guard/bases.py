"""Evictions that follow predictions, or the past, without a guard."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Set
from random import Random

import attrs

from kvpolicy import Block, BlockEviction
from kvpolicy_plugins.guard.predictors import Predictor, as_predictor
from kvpolicy_plugins.guard.slots import Slots

_SPARE_ENTRIES = 64


@attrs.define(eq=False, kw_only=True)
class LRU:
    """Evict the block whose last request is longest ago."""

    _capacity: int
    _rng: Random
    _order: OrderedDict[Block, None] = attrs.field(factory=OrderedDict, init=False)

    def hit(self, block: Block) -> None:
        """The block becomes the newest."""
        self._order.move_to_end(block)

    def insert(self, block: Block) -> None:
        """The block becomes the newest."""
        self._order[block] = None

    def choose(self, wanted: Block, evictable: Set[Block]) -> Block:
        """The oldest that may leave."""
        return next(block for block in self._order if block in evictable)

    def evict(self, block: Block) -> None:
        """Forget it."""
        del self._order[block]


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
    # Latest time first, then lowest slot; entries of older requests are skipped when they come up.
    _ranked: list[tuple[float, int, int, Block]] = attrs.field(factory=list, init=False)
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
        kept = []
        while True:
            entry = heapq.heappop(self._ranked)
            _, _, number, block = entry
            if self._newest.get(block, (0.0, -1))[1] != number:
                continue
            kept.append(entry)
            if block in evictable:
                break
        for one in kept:
            heapq.heappush(self._ranked, one)
        return block

    def evict(self, block: Block) -> None:
        """Forget it."""
        self._slots.evict(block)
        del self._newest[block]

    def _predict(self, block: Block) -> None:
        time = self._predictor.predict(block)
        if math.isnan(time):
            msg = f"the predictor answered {time} for block {block!r:.60}; a time is a number"
            raise ValueError(msg)
        self._num_requests += 1
        self._newest[block] = time, self._num_requests
        if len(self._ranked) > 2 * len(self._newest) + _SPARE_ENTRIES:
            newest = self._newest.items()
            self._ranked = [(-t, self._slots[b], number, b) for b, (t, number) in newest]
            heapq.heapify(self._ranked)
        else:
            heapq.heappush(self._ranked, (-time, self._slots[block], self._num_requests, block))


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

    def hit(self, block: Block) -> None:
        """Predict again."""
        self._labels[block] = self.predictor.predict(block)

    def insert(self, block: Block) -> None:
        """Predict."""
        self._slots.insert(block)
        self._labels[block] = self.predictor.predict(block)

    def choose(self, wanted: Block, evictable: Set[Block]) -> Block:
        """A random block of label 1, if there is one."""
        blocks = self._slots.sorted(evictable)
        labelled = [block for block in blocks if self._labels[block] == 1]
        return self._rng.choice(labelled or blocks)

    def evict(self, block: Block) -> None:
        """Forget it."""
        self._slots.evict(block)
        del self._labels[block]


def following(predictor: str | Predictor, *, capacity: int, rng: Random) -> BlockEviction:
    """The eviction that follows a predictor: `BlindOracle` for times, `LRB` for labels."""
    built = as_predictor(predictor)
    base = LRB if built.gives_labels else BlindOracle
    return base(predictor=built, capacity=capacity, rng=rng)
