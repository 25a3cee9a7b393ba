"""A compaction as a value: which slots are due, and what one call of the hooks is about."""

from collections import abc
from typing import Any

import attrs
from torch import Tensor

from kvpolicy.cache.rows import LayerRows
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.hooks.late_checks import LateChecks
from kvpolicy.hooks.stack import Stack
from kvpolicy.state import Memory


@attrs.frozen(eq=False)
class DueSlot:
    """The slot of a sequence in a layer where it is due.

    Attributes:
        layer_idx: Decoder layer, counted from 0.
        sequence: The sequence.
        stack: The layer's policies.
        budget: Rows that stay.
    """

    layer_idx: int
    sequence: Sequence
    stack: Stack
    budget: int

    @property
    def slot(self) -> int:
        """The slot."""
        return self.sequence.slot


@attrs.define(eq=False)
class Compaction:
    """One call of the hooks: slots that hold equally many rows, of layers that are asked together.

    Attributes:
        due: The slot and the layer of each entry of the batch axis, in the order of layers.
        rows: Their rows.
        late: Keeps answers whose values are checked later; ``None``: they are checked at once.
        keep: Which rows stay, once it is known: int64 ``[B, H_kv, K]`` or bool ``[B, H_kv, T]``.
        arguments: Arguments of `score` that extensions supply.
    """

    due: list[DueSlot]
    rows: LayerRows
    late: LateChecks | None = None
    keep: Tensor | None = None
    arguments: dict[str, Any] = attrs.field(factory=dict)

    @property
    def sequences(self) -> abc.Sequence[Sequence]:
        """The sequence of each entry."""
        return [one.sequence for one in self.due]

    @property
    def memory(self) -> Memory:
        """What policies remember of them."""
        return Memory([one.sequence.memory for one in self.due])
