"""Eviction of blocks that are asked for again: the contract between a store and what it asks.

A store, such as a prefix cache, holds up to ``capacity`` blocks. A request for a block that it
holds is a hit; any other is a miss, which inserts the block and, where the store is full, evicts
one before. Unlike a row that a policy evicts, the block may be asked for again; then it is a miss.

For each request the store makes these calls, in this order:

* a hit: ``hit(block)``;
* a miss with free room: ``insert(block)``;
* a miss without: ``victim = choose(block, evictable)``, ``evict(victim)``, ``insert(block)``.

A prompt of ``m`` blocks is ``m`` requests, in the order of its prefix.

`load_block_eviction` builds one by its name, an entry point of the group
``kvpolicy.block_evictions``. One object serves one store from its first request on.
"""

from collections.abc import Hashable, Set
from random import Random
from typing import Any, Protocol, runtime_checkable

import attrs

from kvpolicy.entry_points import conflict, installed, load_installed, nearest
from kvpolicy.errors import (
    CacheError,
    HookError,
    HookResultError,
    KnobError,
    KVPolicyError,
    PolicyLoadError,
    UnknownPolicyError,
    error_summary,
    is_interrupt,
    refusal_reason,
    shown,
)
from kvpolicy.hooks.discovery import PolicyInfo, describe_policy
from kvpolicy.plugin_code import plugin_code
from kvpolicy.validators import positive_int

GROUP = "kvpolicy.block_evictions"

Block = Hashable
"""What names a block: the hash of a prefix, for example. Equal blocks hold equal tokens."""


@runtime_checkable
class BlockEviction(Protocol):
    """Decides which block leaves a full store.

    A class of an entry point is called with the keyword arguments ``capacity`` (the most blocks
    that the store holds), ``rng`` (a `random.Random`; the only source of randomness) and its knobs.
    """

    def hit(self, block: Block, /) -> None:
        """A request has found its block."""

    def insert(self, block: Block, /) -> None:
        """A block has been stored, by a request that missed it."""

    def choose(self, wanted: Block, evictable: Set[Block], /) -> Block:
        """Choose the block that makes room.

        Args:
            wanted: The block that is asked for and not stored; the next one that is inserted.
            evictable: Blocks of which one may leave; not empty. A store leaves out blocks that are
                in use (pinned), those of the same prompt, and those that others continue (a
                prefix tree evicts leaves first). The set may be a view of the store's own: read it
                during the call only. The answer must not depend on the order of its elements.

        Returns:
            An element of ``evictable``.
        """

    def evict(self, block: Block, /) -> None:
        """A block has left the store: the chosen one, or one that the store dropped by itself."""


class CheckedBlockEviction:
    """A `BlockEviction` whose answers are checked, as `load_block_eviction` returns it.

    Attributes:
        name: Its name.
        inner: The object that is asked.
    """

    def __init__(self, name: str, inner: BlockEviction) -> None:
        self.name = name
        self.inner = inner
        self._stored: set[Block] = set()

    def hit(self, block: Block, /) -> None:
        """Pass a hit on.

        Raises:
            CacheError: The block is not stored.
            HookError: The eviction raised an exception.
        """
        self._expect(block, stored=True, call="hit")
        self._call("hit", block)

    def insert(self, block: Block, /) -> None:
        """Pass an insertion on; raises as `hit` does if the block is stored already."""
        self._expect(block, stored=False, call="insert")
        self._stored.add(block)
        self._call("insert", block)

    def choose(self, wanted: Block, evictable: Set[Block], /) -> Block:
        """Ask for a victim; raises as `hit` does.

        Raises:
            HookResultError: The answer is not evictable.
        """
        self._expect(wanted, stored=False, call="choose")
        if not evictable:
            msg = (
                f"block eviction '{self.name}' was asked to choose among no blocks; wait until "
                "one may leave, or refuse the request"
            )
            raise CacheError(msg)
        victim = self._call("choose", wanted, evictable)
        if not _is_hashable(victim) or victim not in evictable:
            msg = (
                f"block eviction '{self.name}' chose {shown(victim)}, which is not among the "
                f"{len(evictable)} blocks that may leave; return one of them"
            )
            raise HookResultError(msg)
        return victim

    def evict(self, block: Block, /) -> None:
        """Pass an eviction on; raises as `hit` does."""
        self._expect(block, stored=True, call="evict")
        self._stored.remove(block)
        self._call("evict", block)

    def _expect(self, block: Block, *, stored: bool, call: str) -> None:
        if (block in self._stored) is not stored:
            state = "is not stored" if stored else "is stored already"
            msg = (
                f"{call}({shown(block)}) was told to block eviction '{self.name}', but this block "
                f"{state}; a store tells of every insertion and eviction once"
            )
            raise CacheError(msg)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.inner, method)(*arguments)
        except BaseException as error:
            if is_interrupt(error):
                raise
            summary = error_summary(error)
            msg = f"block eviction '{self.name}' failed in {method}: {summary}"
            raise HookError(msg) from error


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except Exception:
        return False
    return True


def installed_block_evictions() -> list[PolicyInfo]:
    """All installed ones in alphabetical order, without importing them."""
    found = []
    for name, point in installed(GROUP).items():
        info = describe_policy(point)
        several = conflict(GROUP, name)
        found.append(info if several is None else attrs.evolve(info, problem=several))
    return found


def load_block_eviction(
    name: str, /, *, capacity: int, rng: Random, **knobs: Any
) -> CheckedBlockEviction:
    """Build a block eviction for one store.

    Args:
        name: Name of the entry point.
        capacity: The most blocks that the store holds, at least 1.
        rng: Where all its randomness comes from; seeded by the caller.
        knobs: Its knobs; those not given take their defaults.

    Raises:
        UnknownPolicyError: No block eviction has this name.
        PolicyLoadError: It cannot be imported, or lacks a method.
        KnobError: It has no such knob, or rejects a value.
    """
    if not isinstance(name, str) or name not in installed(GROUP):
        typed = name if isinstance(name, str) else ""
        msg = f"no block eviction is named {shown(name)}{nearest(typed, installed(GROUP))}"
        raise UnknownPolicyError(msg)
    try:
        positive_int(capacity)
    except TypeError as error:
        msg = f"block eviction '{name}' was given capacity={error}"
        raise KnobError(msg) from error
    cls = load_installed(GROUP, name, what="block eviction", error=PolicyLoadError)
    known = [knob.name for knob in describe_policy(installed(GROUP)[name]).knobs]
    for knob in knobs:
        if knob not in known:
            msg = f"block eviction '{name}' has no knob '{knob}'{nearest(knob, known)}"
            raise KnobError(msg)
    with plugin_code(
        f"block eviction '{name}' refuses its knobs",
        KnobError,
        hint=". See `kvpolicy list`",
        describe=refusal_reason,
        passes=(KVPolicyError,),
    ):
        built = cls(capacity=capacity, rng=rng, **knobs)
    if not isinstance(built, BlockEviction):
        methods = ("hit", "insert", "choose", "evict")
        missing = [method for method in methods if not hasattr(built, method)]
        msg = f"block eviction '{name}' has no method {' or '.join(missing)}; all are called"
        raise PolicyLoadError(msg)
    return CheckedBlockEviction(name, built)
