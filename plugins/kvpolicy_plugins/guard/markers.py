"""Marking algorithms, which Guard is compared with: a block is marked when it is asked for.

Only blocks without a mark leave. When all have one, a phase begins, and the marks are removed.
"""

from collections.abc import Set
from random import Random

import attrs

from kvpolicy import Block
from kvpolicy_plugins.guard.bases import Base, following
from kvpolicy_plugins.guard.predictors import Predictor
from kvpolicy_plugins.guard.slots import Slots, SlotSet


@attrs.define(eq=False, kw_only=True)
class Marker:
    """Evict a random block that has not been asked for in this phase.

    A. Fiat and others, "Competitive paging algorithms", 1991. A phase begins with the first request
    after every place has a mark, a hit included, as in the code that Guard is compared in.
    """

    _capacity: int
    _rng: Random
    _slots: Slots = attrs.field(factory=Slots, init=False)
    _num_stored: int = attrs.field(default=0, init=False)
    _unmarked: SlotSet = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._unmarked = SlotSet(self._slots)

    def hit(self, block: Block) -> None:
        """Mark it."""
        self._begin_request()
        self._unmarked.remove(block)

    def insert(self, block: Block) -> None:
        """It is stored with a mark."""
        self._num_stored += 1
        self._slots.insert(block)

    def choose(self, wanted: Block, evictable: Set[Block]) -> Block:
        """A random block without a mark; any, if all that may leave have one."""
        self._begin_request()
        return _drawn(self._rng, self._unmarked, self._slots, evictable)

    def evict(self, block: Block) -> None:
        """Forget it."""
        self._num_stored -= 1
        self._unmarked.remove(block)
        self._slots.evict(block)

    def _begin_request(self) -> None:
        if self._num_stored - len(self._unmarked) == self._capacity:
            self._unmarked.fill()


@attrs.define(eq=False, kw_only=True)
class LMarker:
    """Marker that follows predictions for new blocks, and evicts at random for old ones.

    D. Rohatgi, "Near-optimal bounds for online caching with machine learned advice", SODA 2020.

    Attributes:
        predictor: As for `Guard`.
    """

    predictor: str | Predictor = "popu"
    _capacity: int
    _rng: Random
    _base: Base = attrs.field(init=False)  # marked blocks are protected
    _slots: Slots = attrs.field(factory=Slots, init=False)
    _unmarked: SlotSet = attrs.field(init=False)
    _stale: set[Block] = attrs.field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self._base = following(self.predictor, capacity=self._capacity, rng=self._rng)
        self._unmarked = SlotSet(self._slots)

    def hit(self, block: Block) -> None:
        """Mark it."""
        self._unmarked.remove(block)
        self._base.hit(block)
        self._base.protect(block)

    def insert(self, block: Block) -> None:
        """It is stored with a mark."""
        self._slots.insert(block)
        self._base.insert(block)
        self._base.protect(block)

    def choose(self, wanted: Block, evictable: Set[Block]) -> Block:
        """A block without a mark: at random if the wanted one was stored when the phase began."""
        if not self._unmarked:
            self._unmarked.fill()
            self._base.unprotect_all()
            self._stale = self._slots.stored()
        if wanted in self._stale:
            return _drawn(self._rng, self._unmarked, self._slots, evictable)
        return self._base.choose(wanted, evictable)

    def evict(self, block: Block) -> None:
        """Forget it."""
        self._unmarked.remove(block)
        self._slots.evict(block)
        self._base.evict(block)


@attrs.define(eq=False, kw_only=True)
class PredictiveMarker:
    """Marker that follows predictions until a chain of evictions becomes long.

    T. Lykouris and S. Vassilvitskii, "Competitive caching with machine learned advice", 2018. A
    miss of a block that was not stored when the phase began starts a chain; a miss of the block
    that the chain evicted last continues it. In the paper a chain longer than ``H(capacity)``
    evicts at random. In the code that Guard is compared in lengths are not counted up, so it never
    does.

    Attributes:
        predictor: As for `Guard`.
        count_chains: Whether lengths are counted, as in the paper; by default as in the code.
    """

    predictor: str | Predictor = "popu"
    count_chains: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    _capacity: int
    _rng: Random
    _base: Base = attrs.field(init=False)  # marked blocks are protected
    _slots: Slots = attrs.field(factory=Slots, init=False)
    _unmarked: SlotSet = attrs.field(init=False)
    _chains: dict[Block, int] = attrs.field(factory=dict, init=False)  # length, by what left last
    _longest: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._base = following(self.predictor, capacity=self._capacity, rng=self._rng)
        self._unmarked = SlotSet(self._slots)
        self._longest = sum(1 / i for i in range(1, self._capacity + 1))

    def hit(self, block: Block) -> None:
        """Mark it."""
        self._unmarked.remove(block)
        self._base.hit(block)
        self._base.protect(block)

    def insert(self, block: Block) -> None:
        """It is stored with a mark."""
        self._slots.insert(block)
        self._base.insert(block)
        self._base.protect(block)

    def choose(self, wanted: Block, evictable: Set[Block]) -> Block:
        """A block without a mark: at random if the wanted one ends a long chain."""
        if not self._unmarked:
            self._unmarked.fill()
            self._base.unprotect_all()
            self._chains = {}
        length = self._chains.pop(wanted, 0) + 1
        if self.count_chains and length > self._longest:
            victim = _drawn(self._rng, self._unmarked, self._slots, evictable)
        else:
            victim = self._base.choose(wanted, evictable)
        self._chains[victim] = length
        return victim

    def evict(self, block: Block) -> None:
        """Forget it."""
        self._unmarked.remove(block)
        self._slots.evict(block)
        self._base.evict(block)


def _drawn(rng: Random, unmarked: SlotSet, slots: Slots, evictable: Set[Block]) -> Block:
    """A random block without a mark; any, if all that may leave have one."""
    drawn = unmarked.draw(rng, evictable)
    return drawn[0] if drawn else rng.choice(slots.sorted(evictable))
