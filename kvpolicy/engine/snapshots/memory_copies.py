"""Copies of what policies remember of a sequence.

A dict of plain data and tensors is copied as it is. A policy whose memory holds objects of its own
may have two methods, ``pack_memory(memory)``, which answers with plain data, and
``unpack_memory(packed, tokenizer)``, which makes the memory again. In a copy, memory is kept by the
number of the policy in its engine, which is the same in every engine of an equal plan.
"""

from collections import abc
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor

from kvpolicy.errors import SnapshotError, error_summary, type_name
from kvpolicy.hooks.declarations import PACKING
from kvpolicy.hooks.stack import Stack
from kvpolicy.plugin_code import declared_by
from kvpolicy.state import SequenceMemory


class MemoryCopies:
    """Copies the memory of the sequences of one engine.

    Attributes:
        policies: All policies, parts included, by their number: in the order of layers and stacks.
        names: Their names.
        numbers: The numbers of the policies of each layer's stack.
    """

    def __init__(self, stacks: abc.Sequence[Stack], tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.policies: list[object] = []
        self.names: list[str] = []
        known: dict[int, int] = {}
        for stack in stacks:
            for policy in stack.policies:
                if id(policy) not in known:
                    known[id(policy)] = len(known)
                    self.policies.append(policy)
                    self.names.append(type_name(policy))
        self.numbers = [[known[id(policy)] for policy in stack.policies] for stack in stacks]

    def pack(self, memory: SequenceMemory) -> dict[int, Any]:
        """What each policy remembers of a sequence, copied, by its number.

        Raises:
            SnapshotError: If something that a policy has stored cannot be copied.
        """
        packed = {}
        for number, policy in enumerate(self.policies):
            if memory.has(policy):
                with _copying(policy):
                    notes = memory.of(policy)
                    given = policy.pack_memory(notes) if _packs(policy) else notes  # type: ignore[attr-defined]
                    packed[number] = deepcopy(given, self._shared())
        return packed

    def unpack(
        self,
        packed: abc.Mapping[int, Any],
        memory: SequenceMemory,
        moved: abc.Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """Fill the memory of a sequence with a copy of what was packed.

        Args:
            packed: What `pack` returned, here or in another engine of an equal plan.
            memory: The memory.
            moved: Tensors of ``packed``, each with its copy on the device where it belongs.

        Raises:
            SnapshotError: If something cannot be copied.
        """
        for number, own in packed.items():
            policy = self.policies[number]
            with _copying(policy):
                given = deepcopy(own, self._shared() | {id(old): new for old, new in moved})
                if _packs(policy):
                    given = policy.unpack_memory(given, self._tokenizer)  # type: ignore[attr-defined]
                memory.put(policy, given)

    def copy(self, memory: SequenceMemory) -> SequenceMemory:
        """A copy of the memory of a sequence.

        Raises:
            SnapshotError: If something that a policy has stored cannot be copied.
        """
        copied = SequenceMemory()
        self.unpack(self.pack(memory), copied)
        return copied

    def _shared(self) -> dict[int, object]:
        """What copies refer to as well, for `deepcopy`: policies and the tokenizer."""
        return {id(one): one for one in (*self.policies, self._tokenizer)}


@contextmanager
def _copying(policy: object) -> abc.Iterator[None]:
    """Name the policy whose memory cannot be copied in a ``with`` block."""
    try:
        yield
    except Exception as error:
        reason = error_summary(error).rstrip(".")
        msg = (
            f"the memory of {type_name(policy)} cannot be copied: {reason}; policies should store "
            "tensors and plain data"
        )
        raise SnapshotError(msg) from error


def _packs(policy: object) -> bool:
    return all(declared_by(policy, name, None) is not None for name in PACKING)
