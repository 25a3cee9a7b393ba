"""What an engine reuses of prompts that it has seen, and what it stores of those that it serves.

The state of a sequence in the middle of its prompt depends on the tokens so far: rows, tracks,
queries, and what policies remember. It is stored at the ends of blocks, before a compaction that is
due there, and a prompt that begins with the same tokens goes on from there. Chunks of a prefill end
at the ends of blocks where anything but the rows changes with every token.

States of fixed size are of all tokens so far, and larger than the rows of many tokens: they are
stored at the ends of 1, 2, 4, 8 ... blocks, and then whenever so many tokens as have rows of their
size have come.

A policy that declares ``cuts_prompts = False`` remembers something within a prompt that depends on
the rest of it. Then only equal prompts share anything: the state before the last token.
"""

import hashlib
import json
import logging
import uuid
from collections import abc
from functools import cached_property
from typing import Any

import attrs

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.engine.extensions.base import ANY, Extension
from kvpolicy.engine.extensions.snapshots import Snapshots, must_see_end
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.resuming import Resuming
from kvpolicy.engine.reuse.nodes import Node, block_keys, chained
from kvpolicy.engine.reuse.parts import SequencePart, joined
from kvpolicy.engine.reuse.store import Found, PrefixStore
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.engine.step import Drawn, Output, Step
from kvpolicy.errors import KVPolicyError, SnapshotError, error_summary
from kvpolicy.hooks.stack import Stack
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.fingerprint import tokenizer_fingerprint
from kvpolicy.plan.resolved import ResolvedPlan

_log = logging.getLogger(__name__)

# What no token is, before those of a whole prompt or of the end of a conversation.
_WHOLE, _TURN = -1, -2


class Prefixes:
    """What an engine needs to use a prefix store.

    Attributes:
        store: The store.
        adapter: The model.
        resuming: Takes snapshots, and resumes them.
        cuts_prompts: Whether prompts share beginnings, and not only themselves.
        ends_chunks: Whether chunks must end where a block does, because more than rows is stored.
        stride: Tokens between two states that are stored once a sequence was compacted. Each of
            them has all rows of the slot, so they take as many bytes as rows of these tokens.
    """

    def __init__(
        self,
        store: PrefixStore,
        resuming: Resuming,
        adapter: ModelAdapter,
        plan: ResolvedPlan,
        stacks: abc.Sequence[Stack],
        tokenizer: Any,
    ) -> None:
        """Bind a store to an engine.

        Raises:
            KVPolicyError: If sequences of the engine cannot be copied.
            ModelError: If weights of the model are not in memory.
        """
        if not isinstance(store, PrefixStore):
            msg = f"prefix_store was given as {store!r:.60}; give a kvpolicy.PrefixStore"
            raise KVPolicyError(msg)
        if (problem := resuming.problem) is not None:
            msg = f"no prefix can be stored: {problem}; leave out the prefix store"
            raise KVPolicyError(msg)
        if store.spills and adapter.processes.num_processes > 1:
            msg = (
                "the prefix store writes files, and several processes share the model, each of "
                "which has rows of its own heads; leave out spill"
            )
            raise KVPolicyError(msg)
        self.store, self.adapter, self.resuming = store, adapter, resuming
        declared = [one for stack in stacks for one in stack.declared]
        self.cuts_prompts = all(one.cuts_prompts for one in declared) and not (
            adapter.rotates_by_length
        )
        self.ends_chunks = any(map(_keeps_more_than_rows, stacks)) or not self.cuts_prompts
        sizes = [
            layer.budget + (layer.prefill_buffer or layer.buffer)
            for layer in plan.layers
            if layer.budget is not None
        ]
        block = store.block_tokens
        self.stride = -(-max(sizes, default=1) // block) * block
        self._read_with = f"{tokenizer_fingerprint(tokenizer)} {block}".encode()
        self._root: tuple[dict[str, Any], bytes] | None = None
        adapter.fingerprint()  # reads the weights now, and not for the first request

    def root(self) -> bytes:
        """The key of no token at all: a hash of plan, tokenizer, and the model as it is now."""
        identity = self.resuming.identity
        if identity["model"]["weights"] is None:  # offloaded meanwhile: nothing is found or kept
            return uuid.uuid4().bytes
        if self._root is None or self._root[0] is not identity:
            content = json.dumps(identity, sort_keys=True).encode()
            self._root = identity, hashlib.sha256(self._read_with + content).digest()
        return self._root[1]


def _keeps_more_than_rows(stack: Stack) -> bool:
    return bool(
        stack.window_size
        or not set(ACCUMULATORS).isdisjoint(stack.tracks)
        or stack.implements("observe")
        or "memory" in stack.arguments("due")
    )


@attrs.define(eq=False)
class _Progress:
    """What has been found and stored of one sequence.

    Attributes:
        root: The key of no token at all, with the model as it was when the sequence began.
        keys: Keys of the whole blocks of its prompt, behind that of no token.
        whole: Key of its whole prompt.
        node: The last node that it has found or stored, to which its next one is added.
        is_fresh: Whether its state is that of a prompt that is prefilled, and of no conversation.
        stores: Whether more of it is stored.
        seen: Tokens of its prompt that were in at the last look.
    """

    root: bytes
    keys: list[bytes]
    whole: bytes
    node: Node | None = None
    is_fresh: bool = True
    stores: bool = True
    seen: int = 0


class PrefixReuse(Extension):
    """Looks up and stores the sequences of one core.

    Attributes:
        num_reused: Tokens so far that were not computed.
    """

    def __init__(self, prefixes: Prefixes, snapshots: Snapshots) -> None:
        """Take a store that is bound to the engine, and what copies sequences."""
        self._prefixes, self._store = prefixes, prefixes.store
        self._snapshots = snapshots
        self.num_reused = 0
        self._progress: dict[Sequence, _Progress] = {}  # in order of admission

    def report(self) -> abc.Mapping[str, Any]:
        """How many tokens were not computed."""
        return {"reused_tokens": self.num_reused}

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """What is stored at the end is the slot as it was at the last token."""
        keeps_ends = self._store.conversations
        return 1 if keeps_ends and must_see_end(self.cache, sequences) else ANY

    def admit(self, group: abc.Sequence[Sequence]) -> None:
        """Note sequences that have been given slots."""
        block, root = self._store.block_tokens, self._prefixes.root()
        for seq in group:
            # At least one token is left, whose logits are wanted.
            keys = block_keys(root, seq.prompt[:-1], block)
            progress = _Progress(root, keys, chained(root, (_WHOLE, *seq.prompt)))
            progress.is_fresh = seq.request.resume is None
            if seq.request.images is not None:  # equal tokens, and other rows for other images
                progress.root, progress.is_fresh = b"", False
            self._progress[seq] = progress

    def advance(self, sequences: abc.Sequence[Sequence]) -> None:
        """Have sequences go on with what is stored."""
        root = self._prefixes.root() if sequences else b""
        for seq, progress in self._progress.items():
            if seq in sequences:
                if progress.root != root:  # its rows are of the model as it was before
                    progress.root, progress.is_fresh = b"", False
                self._look_up(seq, progress)

    def ready(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Those whose next block is not computed by one that was admitted before them."""
        chosen: list[Sequence] = []
        computed: set[bytes] = set()
        for seq, progress in self._progress.items():
            if seq.finish_reason is not None or self._seen(seq) >= len(seq.prompt):
                continue
            key = self._next_key(seq, progress)
            if key not in computed and seq in sequences:
                chosen.append(seq)
            if key is not None:
                computed.add(key)
        return chosen

    def chunk_limit(self, seq: Sequence) -> int:
        """Tokens up to where the next chunk of a sequence must end."""
        progress = self._progress[seq]
        if not (progress.is_fresh and progress.stores and self._ends_chunks(seq)):
            return ANY
        end = self._next_end(seq, self._seen(seq))
        return ANY if end is None else end - self._seen(seq)

    def after(self, step: Step, output: Output, drawn: Drawn) -> None:
        """Store what sequences hold after a chunk, before it is compacted."""
        for seq in () if step.is_decode else step.sequences:
            progress = self._progress[seq]
            if seq.error is None and progress.is_fresh and progress.stores:
                self._store_blocks(seq, progress)
            progress.seen = self._seen(seq)

    def finish(self, seq: Sequence) -> None:
        """Store a sequence that has ended, for requests that go on with it."""
        progress = self._progress.pop(seq)
        ends_well = seq.finish_reason in ("stop", "length")
        if self._store.conversations and ends_well and progress.root == self._prefixes.root():
            self._store_turn(seq, progress)
        self._store.let_go(progress)

    # Finding

    def _look_up(self, seq: Sequence, progress: _Progress) -> None:
        """Have a sequence go on with the longest state that is stored, if there is one."""
        # Rows that are copied have no log-probabilities.
        if not progress.is_fresh or seq.request.prompt_logprobs is not None:
            return
        if self._seen(seq) == 0 and self._store.conversations:
            found = self._store.find_turn(progress, progress.keys, seq.prompt)
            if found is not None and self._can_grow(seq, found):
                self._go_on(seq, progress, found)
                return
        wanted = self._wanted(seq, progress)
        found = self._store.find(progress, wanted, seq.prompt, progress.node)
        if found is not None:
            self._go_on(seq, progress, found)

    def _wanted(self, seq: Sequence, progress: _Progress) -> abc.Iterator[tuple[bytes, int]]:
        """Keys of states beyond what a sequence has seen, and their tokens; the longest first."""
        seen, block = self._seen(seq), self._store.block_tokens
        if self._prefixes.cuts_prompts:
            for number in range(len(progress.keys) - 1, seen // block, -1):
                yield progress.keys[number], number * block
        elif seen < len(seq.prompt) - 1:
            yield progress.whole, len(seq.prompt)

    def _can_grow(self, seq: Sequence, found: Found) -> bool:
        """Whether a conversation may become as long as a sequence."""
        before = found.parts[-1].snapshot.seq_len
        return self._prefixes.adapter.growth_problem(before, seq.max_len - 1) is None

    def _go_on(self, seq: Sequence, progress: _Progress, found: Found) -> None:
        """Have a sequence go on with what was found, if it is what was stored."""
        snapshot = self._joined(found, seq)
        if snapshot is None:
            self._store.drop(found.node.chain[0])
            return
        is_turn = found.node.turn_of is not None
        if not is_turn:
            contents = attrs.evolve(snapshot.contents, prompt_len=seq.num_staying)
            snapshot = attrs.evolve(snapshot, prompt=seq.prompt, tokens=(), contents=contents)
            # The result is that without a store; a conversation counts what is new, as if resumed.
            for name, value in attrs.asdict(snapshot.costs).items():
                setattr(seq, name, value)
        num_reused = snapshot.seq_len - self._seen(seq)
        seq.num_reused += num_reused
        self.num_reused += num_reused
        self._store.note_reused(num_reused)
        progress.node, progress.is_fresh = found.node, not is_turn
        progress.seen = snapshot.seq_len
        self._snapshots.resume(seq, snapshot)

    def _joined(self, found: Found, seq: Sequence) -> SequenceSnapshot | None:
        """The sequence that was found; ``None`` if parts that were read do not fit together."""
        devices = [layer.shape.device for layer in self.cache.layers]
        token_ids = seq.prompt[: found.node.num_tokens]
        if not found.is_read:
            return joined(found.parts, token_ids, devices)
        try:
            snapshot = joined(found.parts, token_ids, devices)
            contents = snapshot.contents
            staying = min(contents.prompt_len, snapshot.seq_len)  # of a prompt that is longer
            contents = attrs.evolve(contents, prompt_len=staying)
            problem = self._prefixes.resuming.problem_with(snapshot)
            problem = problem or attrs.evolve(snapshot, contents=contents).problem
        except Exception as error:  # of files that someone else has written
            problem = error_summary(error)
        if problem is not None:
            _log.warning("a prefix that was read is left out: %s", problem)
            return None
        return snapshot

    # Storing

    def _store_blocks(self, seq: Sequence, progress: _Progress) -> None:
        """Store the states at the ends of blocks that the last chunk has reached."""
        for end in self._ends(seq, progress):
            key = self._key(progress, end)
            token_ids = seq.prompt[:end] if self._prefixes.cuts_prompts else seq.prompt
            known = self._store.link(progress, key, token_ids)
            if known is None:
                self._store.note_miss()
                known = self._stored(seq, progress, key, token_ids, end)
            if known is None:
                progress.stores = False  # what follows would have no parent
                return
            progress.node = known

    def _store_turn(self, seq: Sequence, progress: _Progress) -> None:
        """Store the end of a sequence."""
        token_ids, block = (*seq.prompt, *seq.tokens), self._store.block_tokens
        keys = block_keys(progress.root, token_ids, block)
        key = chained(keys[-1], (_TURN, *token_ids[len(token_ids) // block * block :]))
        if not self._store.has(key):
            self._stored(seq, progress, key, token_ids, self._seen(seq), turn_of=keys[-1])

    def _stored(
        self,
        seq: Sequence,
        progress: _Progress,
        key: bytes,
        token_ids: abc.Sequence[int],
        seen: int,
        turn_of: bytes | None = None,
    ) -> Node | None:
        """Store what a sequence holds as of some tokens seen; ``None`` if it is not stored."""
        parent = progress.node
        if parent is not None and parent.part is None:  # it was read from a file, without room
            return None
        newest, taken = self._shared(seq, parent, seen)
        try:
            snapshot = self._snapshots.snapshot(seq, newest, seen)
        except SnapshotError:
            return None
        # Tokens are those of the nodes.
        snapshot = attrs.evolve(snapshot, prompt=(), tokens=())
        part = SequencePart(snapshot, tuple(taken), len(seq.tokens) if turn_of else 0)
        if self._store.device is not None:
            part = part.to(self._store.device)
        if part.is_whole:
            parent = None
        num_before = 0 if parent is None else parent.num_tokens
        return self._store.add(progress, key, parent, token_ids[num_before:], part, turn_of)

    def _shared(
        self, seq: Sequence, parent: Node | None, seen: int
    ) -> tuple[list[int | None], list[tuple[int, int]]]:
        """How many rows of each layer are new, and which of those of a node come before them."""
        newest: list[int | None] = []
        taken: list[tuple[int, int]] = []
        part = None if parent is None else parent.part
        for layer_idx in range(len(self.cache.layers)):
            num_new, before = self._num_new(seq, layer_idx, part, seen)
            newest.append(num_new)
            taken.append(before)
        return newest, taken

    def _num_new(
        self, seq: Sequence, layer_idx: int, part: SequencePart | None, seen: int
    ) -> tuple[int | None, tuple[int, int]]:
        """New rows, ``None``: all, and the rows of a part that a sequence holds before them.

        It holds those of a layer that was not compacted since, less what has left a sliding window,
        or the first rows of a prompt that stays.
        """
        cache, layer, place = self.cache, self.cache.layers[layer_idx], (layer_idx, seq.slot)
        num_rows = int(cache.rows[place]) - (self._seen(seq) - seen)
        compacted_at = cache.compacted_at[place]
        if part is None:
            return num_rows if compacted_at == 0 else None, (0, 0)
        held, num_columns = part.snapshot.contents.layers[layer_idx], part.num_columns(layer_idx)
        if compacted_at == held.compacted_at:
            num_new = min(seen - part.snapshot.seq_len, num_rows)
            num_gone = held.rows - (num_rows - num_new)
            return num_new, (num_gone, num_columns)
        staying = min(int(cache.prompt_rows[place]), held.prompt_rows)
        if staying and not layer.layout.drops_unseen:
            return num_rows - staying, (0, staying)
        return None, (0, 0)

    # Where blocks end

    def _ends(self, seq: Sequence, progress: _Progress) -> abc.Iterable[int]:
        """Tokens at which states can be stored, of those that the last chunk has brought in."""
        seen = self._seen(seq)
        if self._ends_chunks(seq):
            return [seen] if seen == self._next_end(seq, progress.seen) else []
        block = self._store.block_tokens
        return range((progress.seen // block + 1) * block, min(seen + 1, len(seq.prompt)), block)

    def _ends_chunks(self, seq: Sequence) -> bool:
        is_final = not self.cache.can_take_back  # what is not stored as a block ends is gone
        return self._prefixes.ends_chunks or is_final or self._is_compacted(seq)

    def _next_end(self, seq: Sequence, seen: int) -> int | None:
        """Tokens at which the state of a sequence is stored next; ``None``: at no more."""
        num = len(seq.prompt)
        if not self._prefixes.cuts_prompts:
            return num - 1 if seen < num - 1 else None
        stride, end = self._stride_of_states, self._store.block_tokens
        if self._is_compacted(seq):
            stride = end = max(self._prefixes.stride, stride)
        while end <= seen and end < stride:
            end *= 2
        if end >= stride:
            end = (seen // stride + 1) * stride
        return end if end < num else None

    @cached_property
    def _stride_of_states(self) -> int:
        """Tokens, whole blocks, whose rows take as many bytes as the states of a sequence."""
        block, cache = self._store.block_tokens, self.cache
        return max(-(-cache.fixed_bytes // (block * int(cache.row_bytes.sum()))), 1) * block

    def _next_key(self, seq: Sequence, progress: _Progress) -> bytes | None:
        """The key of the state that is stored next; ``None``: none is."""
        stores = progress.is_fresh and progress.stores
        end = self._next_end(seq, self._seen(seq)) if stores else None
        return None if end is None else self._key(progress, end)

    def _key(self, progress: _Progress, end: int) -> bytes:
        """The key of a state at the end of a block."""
        if not self._prefixes.cuts_prompts:
            return progress.whole
        return progress.keys[end // self._store.block_tokens]

    def _is_compacted(self, seq: Sequence) -> bool:
        return bool(self.cache.compacted_at[:, seq.slot].any())

    def _seen(self, seq: Sequence) -> int:
        return int(self.cache.seq_len[seq.slot])
