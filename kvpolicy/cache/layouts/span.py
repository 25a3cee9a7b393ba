"""Rows of some entries of slabs, as a compaction and policies reach them."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.exact import with_exact
from kvpolicy.cache.arena import SlabArena
from kvpolicy.cache.store import StoredRows
from kvpolicy.devices import upload


class Entries:
    """Slots, each in a layer, as entries of a batch.

    Attributes:
        places: Their places in the arena, ``[B]``.
        index: The same as an index; a slice if they are in equal steps, so that it gives views.
    """

    def __init__(
        self, places: slice | list[int], device: torch.device, seq_len: np.ndarray
    ) -> None:
        """Take places in the arena, and the tokens that each sequence has seen, ``[B]``."""
        self._seq_len = seq_len
        self.index: slice | Tensor
        if isinstance(places, slice):
            self.index = places
            self.places = torch.arange(places.start, places.stop, places.step, device=device)
        else:
            self.index = self.places = upload(np.array(places), device)

    def __len__(self) -> int:
        return len(self.places)

    def of(self, tensor: Tensor) -> Tensor:
        """These entries of a tensor of the arena."""
        if isinstance(self.index, slice):
            return tensor[self.index]
        return tensor.index_select(0, self.index)

    @property
    def newest(self) -> Tensor:
        """Position of the newest token of each sequence, ``[B]``."""
        return upload(self._seq_len - 1, self.places.device)


@attrs.frozen(eq=False)
class Columns:
    """The rows of slots, ``B`` of them that may hold different numbers, in ``T`` columns.

    Attributes:
        read: Gives the rows of a slab of the layer, ``[B, H_kv, T, ...]``.
        present: Columns that have a row, bool ``[B, 1 or H_kv, T]``.
    """

    read: Callable[[Tensor], Tensor]
    present: Tensor


class Span(ABC):
    """Where some rows of some entries lie, ``T`` of each: what a compaction reads and moves.

    Attributes:
        entries: The entries of the batch axis.
        num_rows: ``T``; in columns, if heads hold different numbers of rows.
    """

    entries: Entries
    num_rows: int

    @property
    def absent(self) -> Tensor | None:
        """Columns that a head has no row for, bool ``[B, H_kv, T]``; ``None``: there are none."""
        return None

    @abstractmethod
    def part(self, first: int, end: int) -> "Span":
        """Those of these rows from one column up to another."""

    @abstractmethod
    def read(self, slab: Tensor) -> Tensor:
        """These rows of a slab of the arena, ``[B, H_kv, T, ...]``; 0 where a row is absent."""

    @abstractmethod
    def write(self, slab: Tensor, rows: Tensor) -> None:
        """Replace these rows of a slab of the arena."""

    def numbers(self, arena: SlabArena, stored: StoredRows) -> Tensor:
        """These rows of keys or values as attention reads them, ``[B, H_kv, T, D]``."""
        rows = stored.read(self.read)
        if stored.exact is None:
            return rows
        ring, positions = self.entries.of(stored.exact), self.read(arena.positions)
        return with_exact(rows, positions, ring, self.entries.newest)

    @abstractmethod
    def keep(
        self,
        arena: SlabArena,
        keep: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        budget: int | None,
    ) -> "Kept":
        """Evict all rows but the chosen ones, in place.

        Args:
            arena: The slabs.
            keep: Rows that stay, int64 ``[B, H_kv, K]``, rising, or bool ``[B, H_kv, T]``.
            keys: Replaces their keys, in the columns of ``keep``; ``None``: they stay.
            values: Replaces their values, likewise.
            budget: Rows that may stay.
        """

    def observed(self, arena: SlabArena, weights_of: Callable[..., Tensor]) -> Tensor:
        """Attention weights of these rows, ``[B, H_q, W, T]``.

        Args:
            arena: The slabs.
            weights_of: Gives the weights of keys ``[B, H_kv, N, D]`` at positions
                ``[B, H_kv, N]``, and takes ``present``, bool likewise: those that there are.
        """
        return weights_of(self.numbers(arena, arena.store.keys), self.read(arena.positions))


@attrs.frozen(eq=False)
class Kept:
    """What `Span.keep` has done.

    Attributes:
        num_rows: Rows that each entry holds now, as `Counts` counts them.
        copied_bytes: The largest temporary copy.
    """

    num_rows: int
    copied_bytes: int


def row_index(places: Tensor, rows: Tensor, slab: Tensor) -> Tensor:
    """Places of rows, ``[B, H_kv, K]``, among those of all entries and heads of a slab.

    Args:
        places: The entry that each belongs to, ``[B]``.
        rows: The rows, ``[B, H_kv, K]``.
        slab: The slab.
    """
    num_heads, capacity = slab.shape[1:3]
    heads = torch.arange(num_heads, device=places.device)
    first = (places[:, None] * num_heads + heads) * capacity
    return rows + first[..., None]


def taken(slab: Tensor, index: Tensor) -> Tensor:
    """Rows of a slab by their places among those of all its entries and heads, a copy."""
    # Copies a row at a time, several times as fast as `gather`, which copies numbers.
    rows = slab.flatten(0, 2).index_select(0, index.flatten())
    return rows.reshape(*index.shape, *slab.shape[3:])
