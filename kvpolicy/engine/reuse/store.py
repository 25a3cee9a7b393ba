"""`PrefixStore`: what sequences have held, kept for requests that begin with the same tokens."""

import logging
import threading
from array import array
from collections import abc
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from kvpolicy.engine.reuse.nodes import Node
from kvpolicy.engine.reuse.parts import SequencePart
from kvpolicy.engine.reuse.tier import EvictionChoice, Tier
from kvpolicy.errors import HookError, KVPolicyError
from kvpolicy.validators import positive_int

DEFAULT_BLOCK_TOKENS = 64

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
    """

    node: Node
    parts: list[SequencePart]


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

        Raises:
            UnknownPolicyError: No eviction has this name.
            KnobError: It has no such knob, or refuses a value.
            KVPolicyError: A size is no number of at least 1.
        """
        for name, value in {"capacity": capacity, "block_tokens": block_tokens}.items():
            try:
                positive_int(value, most=2**62)
            except TypeError as error:
                msg = f"the prefix store was given {name}={error}"
                raise KVPolicyError(msg) from error
        self.block_tokens = block_tokens
        self.conversations = conversations
        self.device = device
        self._lock = threading.RLock()
        self._memory = Tier(capacity, EvictionChoice(eviction, dict(knobs or {}), seed))
        self._nodes: dict[bytes, Node] = {}
        self._turns: dict[bytes, dict[bytes, Node]] = {}
        self._users: WeakKeyDictionary[object, Node] = WeakKeyDictionary()
        self._problem: str | None = None
        self._hits = self._misses = self._refused = self._num_turns = self._reused_tokens = 0

    @property
    def stats(self) -> StoreStats:
        """What it holds now, and how often requests have found something."""
        with self._lock:
            memory = self._memory
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
            )

    # What `Reuse` calls

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
        with self._lock:
            for key, num_tokens in keys:
                node = self._nodes.get(key)
                if node is not None and _is_block(node, token_ids[:num_tokens]):
                    return self._use(user, node, after)
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
        with self._lock:
            for key in reversed(keys):
                ends = sorted(self._turns.get(key, {}).values(), key=lambda node: -node.num_tokens)
                for node in ends:
                    if node.num_tokens < len(token_ids) and node.begins(token_ids):
                        self._num_turns += 1
                        return self._use(user, node, None)
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
        size = part.num_bytes + len(node.token_ids) * node.token_ids.itemsize
        with self._lock:
            has_left = parent is not None and parent not in self._memory
            try:
                if has_left or key in self._nodes or not self._make_room(node, size):
                    self._refused += 1
                    return None
                self._memory.add(node, size)
            except HookError as error:
                self._give_up(error)
                return None
            self._nodes[key] = node
            if turn_of is not None:
                self._turns.setdefault(turn_of, {})[key] = node
            self._users[user] = node
            return node

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

    def _use(self, user: object, node: Node, after: Node | None) -> Found:
        known = set() if after is None else {id(one) for one in after.chain}
        parts = []
        for one in node.chain:
            assert one.part is not None, "it is stored"
            parts.append(one.part)
            if id(one) not in known:
                self._hits += 1
                self._note_hit(one)
        self._users[user] = node
        return Found(node, parts)

    def _note_hit(self, node: Node) -> None:
        if node in self._memory:
            try:
                self._memory.hit(node)
            except HookError as error:
                self._give_up(error)

    def _make_room(self, node: Node, size: int) -> bool:
        if self._problem is not None:
            return False
        in_use = {one.key for one in self._users.values()}
        if node.parent is not None:
            in_use.add(node.parent.key)
        return self._memory.make_room(node.key, size, in_use, self._leave)

    def _leave(self, key: bytes) -> None:
        """Drop a node that leaves memory."""
        node = self._nodes.pop(key)
        self._memory.remove(node)
        if node.turn_of is not None:
            ends = self._turns[node.turn_of]
            del ends[key]
            if not ends:
                del self._turns[node.turn_of]

    def _give_up(self, error: HookError) -> None:
        """Drop everything: without an eviction, nothing can make room."""
        self._problem = str(error)
        _log.warning("the prefix store is empty and stays so: %s", error)
        self._memory.clear()
        self._nodes.clear()
        self._turns.clear()
        self._users.clear()


def _is_block(node: Node, token_ids: abc.Sequence[int]) -> bool:
    """Whether a node is that of some tokens, and of no conversation: hashes may be equal."""
    is_block = node.turn_of is None and node.num_tokens == len(token_ids)
    return is_block and node.begins(token_ids)
