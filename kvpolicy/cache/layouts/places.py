"""Where the new rows of a forward go: decided once for all layers that hold equally many.

Tokens come in columns, ``[B, H, L, ...]`` with pads, or one by one, ``[N, H, ...]`` without; ``H``
is that of the slabs, or 1.
"""

from abc import ABC, abstractmethod

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.arena import slot_index
from kvpolicy.cache.layouts.tokens import NewTokens
from kvpolicy.devices import upload


class Places(ABC):
    """Places of new tokens, or of some of them, in any slab ``[S, H_kv, R, ...]`` of a layer."""

    @abstractmethod
    def put(self, slab: Tensor, new: Tensor | int) -> None:
        """Write tokens that come in columns, or a number."""

    @abstractmethod
    def put_each(self, slab: Tensor, new: Tensor) -> None:
        """Write tokens that come one by one."""


@attrs.frozen(eq=False)
class Block(Places):
    """Equally many tokens of each slot, in the same rows of slots in equal steps: without an index.

    Attributes:
        entries: The slots.
        rows: Their rows.
        columns: The tokens that go there.
        size: Of all tokens, ``(B, L)``.
    """

    entries: slice
    rows: slice
    columns: slice
    size: tuple[int, int]

    def put(self, slab: Tensor, new: Tensor | int) -> None:
        """Write tokens that come in columns, or a number."""
        if self.rows.start < self.rows.stop:
            place = slab[self.entries, :, self.rows]
            if isinstance(new, int):
                place.fill_(new)  # in one kernel
            else:
                place.copy_(new[:, :, self.columns])

    def put_each(self, slab: Tensor, new: Tensor) -> None:
        """Write tokens that come one by one."""
        self.put(slab, new.unflatten(0, self.size).transpose(1, 2))


@attrs.frozen(eq=False)
class Scattered(Places):
    """Any tokens in any rows.

    Attributes:
        tokens: The new tokens of the forward.
        chosen: Which of them go there, without pads, ``[M]``; ``None``: all.
        entries: The slot of each, ``[M]``.
        rows: Its row there, ``[M]``.
    """

    tokens: NewTokens
    chosen: Tensor | None
    entries: Tensor
    rows: Tensor

    def put(self, slab: Tensor, new: Tensor | int) -> None:
        """Write tokens that come in columns, or a number."""
        if not isinstance(new, int):
            self.put_each(slab, self.tokens.real(new))
        elif len(self.rows):
            slab[self.entries, :, self.rows] = new

    def put_each(self, slab: Tensor, new: Tensor) -> None:
        """Write tokens that come one by one."""
        if len(self.rows):
            chosen = new if self.chosen is None else new[self.chosen]
            slab[self.entries, :, self.rows] = chosen


def new_places(
    tokens: NewTokens,
    slots: np.ndarray,
    before: np.ndarray,
    device: torch.device,
    first: int = 0,
    end: int | None = None,
) -> Places:
    """Where new tokens go behind the rows that slots hold.

    Args:
        tokens: The new tokens.
        slots: Where the rows of each sequence are, ``[B]``: slots, or places in another area.
        before: Rows that each holds, ``[B]``.
        device: Where slabs are.
        first: The first row that lies there; rows are counted from it.
        end: The row behind the last one that does; ``None``: all do.
    """
    entries, held = slot_index(slots), int(before[0])
    if isinstance(entries, slice) and not tokens.has_pads and (before == held).all():
        start = max(held, first)
        stop = max(held + tokens.width if end is None else min(held + tokens.width, end), start)
        return Block(
            entries,
            slice(start - first, stop - first),
            slice(start - held, stop - held),
            (len(slots), tokens.width),
        )
    rows, sequences = tokens.rows(before), tokens.sequences
    there = (rows >= first) & (rows < (rows.max() + 1 if end is None else end))
    chosen = np.flatnonzero(there)
    numbers = np.stack([chosen, slots[sequences[chosen]], rows[chosen] - first])
    which, of_slots, of_rows = upload(numbers, device)
    return Scattered(tokens, None if there.all() else which, of_slots, of_rows)
