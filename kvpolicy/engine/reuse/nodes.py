"""The tree of what a store holds: nodes under the chained hash of their tokens."""

import hashlib
from array import array
from collections import abc

import attrs

from kvpolicy.engine.reuse.parts import SequencePart

KEY_BYTES = 16


def chained(before: bytes, token_ids: abc.Iterable[int]) -> bytes:
    """The key of what follows something with a key: a hash of both."""
    found = hashlib.blake2b(before, digest_size=KEY_BYTES)
    found.update(array("q", token_ids).tobytes())
    return found.digest()


def block_keys(root: bytes, token_ids: abc.Sequence[int], block_tokens: int) -> list[bytes]:
    """The keys of the whole blocks of a prompt, behind that of no token at all."""
    keys = [root]
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        keys.append(chained(keys[-1], token_ids[end - block_tokens : end]))
    return keys


@attrs.define(eq=False)
class Node:
    """A part of sequences that begin with the same tokens, and the part that it follows.

    Attributes:
        key: Hash of all tokens up to its end, and of what they are computed with.
        parent: The node whose rows come before its own, if there is one.
        token_ids: Its tokens, behind those of the parent.
        part: What it holds; ``None``: it is on the disk only.
        turn_of: Of the end of a conversation: the key of its last whole block.
    """

    key: bytes
    parent: "Node | None"
    token_ids: "array[int]"
    part: SequencePart | None
    turn_of: bytes | None = None
    num_tokens: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        before = 0 if self.parent is None else self.parent.num_tokens
        self.num_tokens = before + len(self.token_ids)

    @property
    def chain(self) -> "list[Node]":
        """The nodes whose parts it consists of, itself last."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def begins(self, token_ids: abc.Sequence[int]) -> bool:
        """Whether a sequence begins with its tokens: equal hashes are no proof of that."""
        if len(token_ids) < self.num_tokens:
            return False
        end = self.num_tokens
        for node in reversed(self.chain):
            start = end - len(node.token_ids)
            if node.token_ids != array("q", token_ids[start:end]):
                return False
            end = start
        return True
