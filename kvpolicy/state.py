"""What policies remember of a sequence, owned by the sequence and gone with it."""

from collections.abc import Sequence
from typing import Any

import attrs


@attrs.define(eq=False)
class SequenceMemory:
    """The notes all policies keep about one sequence, a dict for each policy object."""

    _notes: dict[int, dict[str, Any]] = attrs.field(factory=dict, init=False)

    def of(self, policy: object) -> dict[str, Any]:
        """The notes of one policy, empty when the sequence was admitted.

        Keyed by identity: a policy is a value without equality, and the stack that holds it
        outlives every sequence, so that an id is never used twice.
        """
        return self._notes.setdefault(id(policy), {})


@attrs.frozen
class Memory:
    """The memories of the sequences in one hook call, in the order of the batch axis."""

    sequences: Sequence[SequenceMemory]

    def of(self, policy: object) -> list[dict[str, Any]]:
        """One dict per sequence: ``memory.of(self)[b]`` is this policy's own for row ``b``."""
        return [sequence.of(policy) for sequence in self.sequences]
