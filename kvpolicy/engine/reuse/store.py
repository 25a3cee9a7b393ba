"""`PrefixStore`: what sequences have held, kept for requests that begin with the same tokens."""

import logging
import os
import threading
from array import array
from collections import abc
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch

from kvpolicy.engine.reuse.nodes import Node
from kvpolicy.engine.reuse.parts import SequencePart
from kvpolicy.engine.reuse.spill import Spill
from kvpolicy.engine.reuse.tier import EvictionChoice, Tier
from kvpolicy.errors import HookError, KVPolicyError
from kvpolicy.validators import positive_int

DEFAULT_BLOCK_TOKENS = 64

# Bytes of files for each byte of memory, unless their number is given.
_SPILL_TIMES = 16

_log = logging.getLogger(__name__)


@attrs.frozen
class StoreStats:
    """What a prefix store holds, and how often requests have found something.

    Attributes:
        capacity: The most bytes.
        num_bytes: Bytes held now.
        num_blocks: Blocks held now, ends of conversations included.
        hits: Blocks that requests have found.
        misses: Blocks that requests have computed, because they were not there.
        evictions: Blocks that have left to make room.
        refused: Blocks that were not stored, because they are too large or nothing may leave.
        problem: Why nothing is stored any more: the eviction has failed. ``None``: it has not.
        spilled_blocks: Blocks in files, those that are in memory, too, included.
        spilled_bytes: Bytes of these files.
        spill_capacity: The most bytes of files; 0: none are written.
        spill_loads: Blocks that were read from a file for a request.
        spill_problem: Why blocks are not written to files now; ``None``: they are.
        turns: Requests that have gone on with a conversation.
        reused_tokens: Prompt tokens that were not computed.
    """

    capacity: int
    num_bytes: int
    num_blocks: int
    hits: int
    misses: int
    evictions: int
    refused: int
    turns: int
    reused_tokens: int
    problem: str | None = None
    spilled_blocks: int = 0
    spilled_bytes: int = 0
    spill_capacity: int = 0
    spill_loads: int = 0
    spill_problem: str | None = None

    @property
    def hit_rate(self) -> float:
        """Share of the blocks asked for that were there."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return attrs.asdict(self) | {"hit_rate": self.hit_rate}


@attrs.frozen(eq=False)
class Found:
    """What a store has found.

    Attributes:
        node: The node, as long as possible.
        parts: The parts of its chain.
        is_read: Whether some of them were read from files.
    """

    node: Node
    parts: list[SequencePart]
    is_read: bool


class PrefixStore:
    """Rows of prompts by blocks of their tokens, and of conversations by their ends.

    Give one to `kvpolicy.Engine`. Engines may share it, also in several threads: what they store is
    found again only with the same model, plan and tokenizer.

    Attributes:
        block_tokens: Tokens of a block.
        conversations: Whether sequences are kept at their end, for requests that go on with them.
        device: Where rows are kept; ``None``: where the model has them.
    """

    def __init__(
        self,
        capacity: int,
        *,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        eviction: str = "lru",
        knobs: abc.Mapping[str, Any] | None = None,
        seed: int = 0,
        conversations: bool = True,
        device: str | None = None,
        spill: str | os.PathLike[str] | None = None,
        spill_bytes: int | None = None,
    ) -> None:
        """An empty store.

        Args:
            capacity: The most bytes that it holds.
            block_tokens: Tokens of a block. Prompts are reused up to the end of a block. A
                prefill has a forward for each of them, unless the policies keep nothing but rows,
                so small blocks make it slower.
            eviction: Which eviction decides what leaves a full store, by name, see
                `kvpolicy.load_block_eviction`.
            knobs: Knobs of the eviction.
            seed: Seed of its random numbers.
            conversations: Whether sequences are kept at their end. A request that begins with all
                tokens of such a sequence, prompt and answer, goes on with it.
            device: Where rows are kept, such as ``"cpu"``; ``None``: where the model has them.
            spill: A folder for what leaves memory, from which it is read when it is asked for
                again, also after a restart. One store at a time may use it; that of another process
                is refused.
            spill_bytes: The most bytes of its files; ``None``: 16 times ``capacity``.

        Raises:
            UnknownPolicyError: No eviction has this name.
            KnobError: It has no such knob, or refuses a value.
            OutputError: The folder cannot be used, or another process uses it.
            KVPolicyError: A size is no number of at least 1, or there is one of files and no
                folder.
        """
        if spill is None and spill_bytes is not None:
            msg = f"the prefix store was given spill_bytes={spill_bytes!r:.60} and no spill folder"
            raise KVPolicyError(msg)
        sizes = {"capacity": capacity, "block_tokens": block_tokens}
        sizes |= {} if spill_bytes is None else {"spill_bytes": spill_bytes}
        for name, value in sizes.items():
            try:
                positive_int(value, most=2**62)
            except TypeError as error:
                msg = f"the prefix store was given {name}={error}"
                raise KVPolicyError(msg) from error
        try:
            torch.empty(0, device=device)
        except (RuntimeError, TypeError, AssertionError) as error:
            msg = f"the prefix store was given device={device!r:.60}; give one such as 'cpu'"
            raise KVPolicyError(msg) from error
        self.block_tokens = block_tokens
        self.conversations = conversations
        self.device = device
        self._lock = threading.RLock()
        choice = EvictionChoice(eviction, dict(knobs or {}), seed)
        self._memory = Tier(capacity, choice)
        self._nodes: dict[bytes, Node] = {}
        self._turns: dict[bytes, dict[bytes, Node]] = {}
        self._users: WeakKeyDictionary[object, Node] = WeakKeyDictionary()
        self._problem: str | None = None
        self._hits = self._misses = self._refused = self._num_turns = self._reused_tokens = 0
        self._spill: Spill | None = None
        if spill is not None:
            self._spill = Spill(spill, spill_bytes or _SPILL_TIMES * capacity, choice)
            for node in self._spill.found(self._forget):
                self._remember(node)

    @property
    def stats(self) -> StoreStats:
        """What it holds now, and how often requests have found something."""
        with self._lock:
            memory, spill = self._memory, self._spill
            of_files: dict[str, Any] = {}
            if spill is not None:
                of_files = {
                    "spilled_blocks": len(spill.tier),
                    "spilled_bytes": spill.tier.num_bytes,
                    "spill_capacity": spill.tier.capacity,
                    "spill_loads": spill.num_loads,
                    "spill_problem": spill.problem,
                }
            return StoreStats(
                capacity=memory.capacity,
                num_bytes=memory.num_bytes,
                num_blocks=len(memory),
                hits=self._hits,
                misses=self._misses,
                evictions=memory.num_evictions,
                refused=self._refused,
                turns=self._num_turns,
                reused_tokens=self._reused_tokens,
                problem=self._problem,
                **of_files,
            )

    @property
    def spills(self) -> bool:
        """Whether what leaves memory is written to files."""
        return self._spill is not None

    def flush(self) -> None:
        """Write what is in memory to files, as far as there is room, so that it is there later.

        Without a folder, nothing happens. If a write has failed before, it is tried again.
        """
        with self._guarded():
            if self._spill is not None:
                self._spill.try_now()
            for node in list(self._nodes.values()):
                if node in self._memory:
                    self._write(node)

    # What `PrefixReuse` calls

    def find(
        self,
        user: object,
        keys: abc.Iterable[tuple[bytes, int]],
        token_ids: abc.Sequence[int],
        after: Node | None,
    ) -> Found | None:
        """The first of some nodes that is stored.

        Args:
            user: Who asks: the node stays until it lets go, asks again, or is gone.
            keys: Keys of the nodes and numbers of their tokens, the longest first.
            token_ids: The tokens that it must begin with.
            after: What the user has already.
        """
        with self._guarded():
            for key, num_tokens in keys:
                node = self._nodes.get(key)
                if node is not None and _is_block(node, token_ids[:num_tokens]):
                    found = self._use(user, node, after)
                    if found is not None:
                        return found
        return None

    def find_turn(
        self, user: object, keys: abc.Sequence[bytes], token_ids: abc.Sequence[int]
    ) -> Found | None:
        """The longest conversation that some tokens go on with.

        Args:
            user: As for `find`.
            keys: Keys of the whole blocks of the tokens, the shortest first.
            token_ids: The tokens.
        """
        with self._guarded():
            for key in reversed(keys):
                ends = sorted(self._turns.get(key, {}).values(), key=lambda node: -node.num_tokens)
                for node in ends:
                    if node.num_tokens < len(token_ids) and node.begins(token_ids):
                        found = self._use(user, node, None)
                        if found is not None:
                            self._num_turns += 1
                            return found
        return None

    def add(
        self,
        user: object,
        key: bytes,
        parent: Node | None,
        token_ids: abc.Iterable[int],
        part: SequencePart,
        turn_of: bytes | None = None,
    ) -> Node | None:
        """Store a node, unless there is no room for it or its parent has left.

        Args:
            user: Who stores it: it stays until this one lets go, stores the next, or is gone.
            key: Its key.
            parent: The node that it follows.
            token_ids: Its tokens, behind those of the parent.
            part: What it holds.
            turn_of: Of the end of a conversation: the key of its last whole block.

        Returns:
            The node; ``None`` if it is not stored.
        """
        node = Node(key, parent, array("q", token_ids), part, turn_of)
        size, before = _num_bytes(node, part), set() if parent is None else {parent.key}
        with self._guarded():
            has_left = parent is not None and parent not in self._memory
            if has_left or key in self._nodes or not self._make_room(key, size, before):
                self._refused += 1
                return None
            self._memory.add(node, size)
            self._remember(node)
            self._users[user] = node
            return node
        return None

    def link(self, user: object, key: bytes, token_ids: abc.Sequence[int]) -> Node | None:
        """The node with a key, if another user has stored it meanwhile; nothing is counted."""
        with self._lock:
            node = self._nodes.get(key)
            if node is None or not _is_block(node, token_ids):
                return None
            self._users[user] = node
            return node

    def has(self, key: bytes) -> bool:
        """Whether a node is stored."""
        return key in self._nodes

    def note_miss(self) -> None:
        """Count a block that was not there."""
        with self._lock:
            self._misses += 1

    def note_reused(self, num_tokens: int) -> None:
        """Count tokens that were not computed."""
        with self._lock:
            self._reused_tokens += num_tokens

    def let_go(self, user: object) -> None:
        """What a user has found or stored may leave."""
        with self._lock:
            self._users.pop(user, None)

    def drop(self, node: Node) -> None:
        """Drop a node that cannot be used, and all that follow it."""
        with self._guarded():
            if node.key in self._nodes:
                self._drop(node)

    def _use(self, user: object, node: Node, after: Node | None) -> Found | None:
        """What a node and those before it hold; ``None`` if a file cannot be read."""
        self._users[user] = node  # it stays, while those before it are read
        known = set() if after is None else {id(one) for one in after.chain}
        chain, parts = node.chain, []
        in_use = {one.key for one in chain}
        is_read = any(one.part is None for one in chain)
        for one in chain:
            part = one.part or self._loaded(one, in_use)
            if part is None:
                self._drop(one)
                self._users.pop(user)
                return None
            parts.append(part)
            if id(one) not in known:
                self._hits += 1
                if one in self._memory:
                    self._memory.hit(one)
        return Found(node, parts, is_read)

    def _loaded(self, node: Node, in_use: set[bytes]) -> SequencePart | None:
        """What a node in a file holds; it is in memory then, if there is room."""
        assert self._spill is not None, "it is in memory, or in a file"
        part = self._spill.load(node)
        is_next = node.parent is None or node.parent in self._memory
        if part is None or not is_next:
            return part
        size = _num_bytes(node, part)
        if self._make_room(node.key, size, in_use):
            node.part = part
            self._memory.add(node, size)
        return part

    def _make_room(self, key: bytes, size: int, in_use: set[bytes]) -> bool:
        if self._problem is not None:
            return False
        of_users = {one.key for one in self._users.values()}
        return self._memory.make_room(key, size, of_users | in_use, self._leave)

    def _leave(self, key: bytes) -> None:
        """Have a node leave memory; it is forgotten unless it is in a file."""
        node = self._nodes[key]
        is_written = self._write(node)
        self._memory.remove(node)
        node.part = None
        if not is_written:
            self._forget(key)

    def _write(self, node: Node) -> bool:
        if self._spill is None:
            return False
        in_use = {one.key for one in self._users.values()}
        return self._spill.write(node, in_use, self._leave_files)

    def _leave_files(self, key: bytes) -> None:
        """Have a node leave the folder; it is forgotten unless it is in memory."""
        assert self._spill is not None
        node = self._nodes[key]
        self._spill.remove(node)
        if node not in self._memory:
            self._forget(key)

    def _drop(self, node: Node) -> None:
        for one in [one for one in self._nodes.values() if node in one.chain]:
            if one in self._memory:
                self._memory.remove(one)
            if self._spill is not None and one in self._spill.tier:
                self._spill.remove(one)
            self._forget(one.key)

    def _remember(self, node: Node) -> None:
        self._nodes[node.key] = node
        if node.turn_of is not None:
            self._turns.setdefault(node.turn_of, {})[node.key] = node

    def _forget(self, key: bytes) -> None:
        node = self._nodes.pop(key, None)
        if node is not None and node.turn_of is not None:
            ends = self._turns[node.turn_of]
            del ends[key]
            if not ends:
                del self._turns[node.turn_of]

    @contextmanager
    def _guarded(self) -> abc.Iterator[None]:
        """Lock the store in a ``with`` block, and give it up if the eviction fails there."""
        with self._lock:
            try:
                yield
            except HookError as error:
                self._give_up(error)

    def _give_up(self, error: HookError) -> None:
        """Drop everything: without an eviction, nothing can make room. Files stay."""
        self._problem = str(error)
        _log.warning("the prefix store is empty and stays so: %s", error)
        self._memory.clear()
        self._spill = None
        self._nodes.clear()
        self._turns.clear()
        self._users.clear()


def _is_block(node: Node, token_ids: abc.Sequence[int]) -> bool:
    """Whether a node is that of some tokens, and of no conversation: hashes may be equal."""
    is_block = node.turn_of is None and node.num_tokens == len(token_ids)
    return is_block and node.begins(token_ids)


def _num_bytes(node: Node, part: SequencePart) -> int:
    return part.num_bytes + len(node.token_ids) * node.token_ids.itemsize
