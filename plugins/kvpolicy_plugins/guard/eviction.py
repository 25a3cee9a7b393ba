"""Guard: follow predictions, and guard what they were wrong about until the phase ends."""

from collections.abc import Set
from random import Random

import attrs

from kvpolicy import Block
from kvpolicy_plugins.guard.bases import Base, following
from kvpolicy_plugins.guard.predictors import Predictor
from kvpolicy_plugins.guard.slots import Slots, SlotSet


def _share(_: object, attribute: "attrs.Attribute[float]", value: object) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        msg = f"{attribute.name}={value!r:.60} is no probability; give a number from 0 to 1"
        raise ValueError(msg)


def _count(_: object, attribute: "attrs.Attribute[int]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        msg = f"{attribute.name}={value!r:.60} is not a count; give a whole number of at least 0"
        raise ValueError(msg)


@attrs.define(eq=False, kw_only=True)
class Guard:
    """Follow predictions as long as they are right, and evict at random where they were wrong.

    Source: "Robustifying Learning-Augmented Caching Efficiently without Compromising
    1-Consistency", NeurIPS 2025, arXiv 2507.16242; authors' code OptiSys-ZJU/Cache-Coliseum,
    commit 4568bb6, class ``Guard`` of ``cache/evict/algorithms.py``.

    A *phase* begins when a block must leave and every block that was stored at the last beginning
    has been asked for or has left. ``U`` are the blocks from before the phase that have not been
    asked for in it, ``E`` what was evicted in it, ``G`` the guarded blocks. On a miss of a block
    in ``E`` the prediction that evicted it was wrong: a random block of ``U`` leaves instead, and
    the block is guarded, so it stays until the phase ends. Any other miss evicts what the
    predictions say among blocks that are not guarded.

    With exact predictions no block is ever guarded and the misses are those of the optimum; with
    any predictions the expected misses are at most ``2 H(capacity - 1) + 2`` times the optimum's,
    plus a constant, ``H`` being the harmonic numbers.

    Deviations: where the store holds blocks back (pinned ones, inner nodes of a prefix tree) the
    random victim is drawn from ``U`` and what may leave; if that is empty, the predictions choose,
    and if only guarded blocks may leave, one of them does. The paper has no such stores, and
    neither promise covers them. ``follow_if_guarded`` is also what the authors' code calls
    GuardWithoutRandomEvict, ``protection=False`` what it calls GuardWithoutProtection. Both
    relaxations at once, which that code does not define, are refused.

    Attributes:
        predictor: ``"popu"``, ``"pleco"``, ``"recency"`` or ``"learned"``, see `predictors`; in
            Python also a `Predictor`. Times are followed by `BlindOracle`, labels by `LRB`.
        relax_times: Errors of a phase from which on blocks are guarded; 0 and 1 are the first.
        relax_prob: Probability that an error is let pass without a guard.
        follow_if_guarded: Whether the predictions choose the victim on an error, too.
        protection: Whether blocks are guarded. Without, every victim is of ``U``.
    """

    predictor: str | Predictor = "popu"
    relax_times: int = attrs.field(default=0, validator=_count)
    relax_prob: float = attrs.field(default=0.0, validator=_share)
    follow_if_guarded: bool = attrs.field(
        default=False, validator=attrs.validators.instance_of(bool)
    )
    protection: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    _capacity: int
    _rng: Random
    _num_guards: int = attrs.field(default=0, init=False)
    _num_phases: int = attrs.field(default=0, init=False)
    # Its protected blocks are the guarded ones (G); without protection all but U.
    _base: Base = attrs.field(init=False)
    _slots: Slots = attrs.field(factory=Slots, init=False)
    _unrequested: SlotSet = attrs.field(init=False)  # U
    _evicted: set[Block] = attrs.field(factory=set, init=False)  # E
    _num_errors: int = attrs.field(default=0, init=False)
    _chosen: tuple[Block] | None = attrs.field(default=None, init=False)
    _guard_next: tuple[Block] | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.relax_times and self.relax_prob:
            msg = "relax_times and relax_prob were both given; give one of them"
            raise ValueError(msg)
        if not self.protection and (self.relax_times or self.relax_prob or self.follow_if_guarded):
            msg = (
                "without protection there is nothing to relax; leave out relax_times, relax_prob "
                "and follow_if_guarded"
            )
            raise ValueError(msg)
        self._base = following(self.predictor, capacity=self._capacity, rng=self._rng)
        self._unrequested = SlotSet(self._slots)

    @property
    def num_guards(self) -> int:
        """Errors so far at which a block was guarded."""
        return self._num_guards

    @property
    def num_phases(self) -> int:
        """Phases so far."""
        return self._num_phases

    def hit(self, block: Block) -> None:
        """The block has been asked for in this phase."""
        self._unrequested.remove(block)
        self._base.hit(block)
        if not self.protection:
            self._base.protect(block)

    def insert(self, block: Block) -> None:
        """Guard the block if it was evicted by mistake."""
        self._slots.insert(block)
        self._base.insert(block)
        if not self.protection or self._guard_next == (block,):
            self._base.protect(block)
        self._guard_next = None

    def choose(self, wanted: Block, evictable: Set[Block]) -> Block:
        """Choose by the predictions, or at random if they were wrong about the wanted block."""
        if not self._unrequested:
            self._begin_phase()
        was_wrong = wanted in self._evicted
        is_error = was_wrong and self.protection and self._is_strict()
        at_random = is_error and not self.follow_if_guarded if self.protection else was_wrong
        drawn = self._unrequested.draw(self._rng, evictable) if at_random else None
        victim = drawn[0] if drawn else self._base.choose(wanted, evictable)
        self._num_guards += is_error
        self._guard_next = (wanted,) if is_error else None
        self._chosen = (victim,)
        return victim

    def evict(self, block: Block) -> None:
        """Remember it, if it was chosen: to miss it in this phase is an error."""
        if self._chosen == (block,):
            self._evicted.add(block)
        self._chosen = None
        self._unrequested.remove(block)
        self._slots.evict(block)
        self._base.evict(block)

    def _begin_phase(self) -> None:
        self._unrequested.fill()
        self._base.unprotect_all()
        self._evicted = set()
        self._num_errors = 0
        self._num_phases += 1

    def _is_strict(self) -> bool:
        """Whether this error is one that guards."""
        self._num_errors += 1
        if self.relax_times:
            return self._num_errors >= self.relax_times
        # Drawn even if it decides nothing: the random numbers are those of the authors' code.
        return self._rng.random() > self.relax_prob
