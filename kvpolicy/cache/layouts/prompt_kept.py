"""Prompts that stay: their rows are the first of a slot, and no compaction chooses from them.

Hooks see the rows behind them. These begin at another row of the slab for each prompt: then what
is read is a copy.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.arena import SlabArena
from kvpolicy.cache.layouts.base import PLENTY, Around, LayerCache
from kvpolicy.cache.layouts.even import EvenSpan
from kvpolicy.cache.layouts.span import Entries, Span, taken
from kvpolicy.cache.shape import UNLIMITED
from kvpolicy.devices import upload


class PromptKept(Around):
    """Even slabs whose slots may hold so many rows behind those of their prompt."""

    _rooms: np.ndarray  # rows that a slot may hold behind its prompt, [n, 1]

    def attach(self, layers: Sequence[LayerCache]) -> None:
        """Take its layers, which say how many rows may be behind a prompt.

        Where that is a whole sliding window, or more, rows leave with it and never by a compaction.
        """
        super().attach(layers)
        rooms = np.array([layer.slab.room for layer in layers])
        windows = np.array([layer.shape.sliding_window or PLENTY for layer in layers])
        self._rooms = np.where(windows <= rooms, UNLIMITED, rooms)[:, None]

    def room(self, slots: Sequence[int]) -> np.ndarray:
        """Free rows of the slab, or tokens up to the room behind the prompt."""
        counts = self.counts
        of_prompt = np.maximum(counts.prompt_len - counts.seq_len, 0)[slots]
        behind = self._rooms - self._num_behind(slots) + of_prompt
        least: np.ndarray = np.minimum(super().room(slots), behind)
        return least

    def full(self, slots: Sequence[int]) -> np.ndarray:
        """Those without a free row, or without room behind their prompt."""
        full: np.ndarray = super().full(slots) | (self._num_behind(slots) >= self._rooms)
        return full

    def count(self, slots: np.ndarray, num_new: int | np.ndarray, num_left: np.ndarray) -> None:
        """Count the rows of prompts; what has left were the first rows."""
        super().count(slots, num_new, num_left)
        counts, own = self.counts, self.own
        of_prompt = np.clip(counts.prompt_len[slots] - counts.seq_len[slots], 0, num_new)
        rows = counts.prompt_rows[own][:, slots] + of_prompt - num_left[own]
        counts.prompt_rows[np.ix_(np.array(self.layers), slots)] = np.maximum(rows, 0)

    def num_staying(self, slots: Sequence[int]) -> np.ndarray:
        """The tokens of the prompts."""
        staying: np.ndarray = self.counts.prompt_len[list(slots)]
        return staying

    def rows(self, layer: LayerCache, layers: Sequence[int], slots: Sequence[int]) -> Span:
        """The rows behind the prompts."""
        layers, slots = list(layers), list(slots)
        before = self.counts.prompt_rows[layers, slots]
        num_rows = int(self.counts.rows[layers[0], slots[0]] - before[0])
        entries = self.entries(layer, layers, slots)
        if not before.any():
            return EvenSpan(entries, num_rows)
        if (before == before[0]).all():
            return RowsBehind(entries, num_rows, int(before[0]))
        return UnequalRows(entries, num_rows, before)

    def _num_behind(self, slots: Sequence[int]) -> np.ndarray:
        """Rows behind the prompts, ``[n, B]``."""
        counts, own = self.counts, self.own
        behind: np.ndarray = counts.rows[own][:, slots] - counts.prompt_rows[own][:, slots]
        return behind


class RowsBehind(EvenSpan):
    """Rows behind prompts of equal length."""

    def observed(self, arena: SlabArena, weights_of: Callable[..., Tensor]) -> Tensor:
        """Rows of a prompt have a share of the softmax, too, and are then left out."""
        return self._behind(_all_weights(self.entries, arena, self._num_all, weights_of))

    @property
    def _num_all(self) -> int:
        """Rows of the fullest slab, up to the last of these."""
        return self.first + self.num_rows

    def _behind(self, weights: Tensor) -> Tensor:
        return weights[..., self.first :]


class UnequalRows(RowsBehind):
    """Rows behind prompts of different lengths."""

    def __init__(self, entries: Entries, num_rows: int, before: np.ndarray) -> None:
        """Take the rows before these, ``[B]``."""
        super().__init__(entries, num_rows, int(before.max()))
        self._before = before
        self._starts = upload(before, entries.places.device)

    @property
    def starts(self) -> Tensor:
        """First row of each entry, ``[B]``."""
        return self._starts

    def part(self, first: int, end: int) -> Span:
        """Some of these rows."""
        return UnequalRows(self.entries, end - first, self._before + first)

    def read(self, slab: Tensor) -> Tensor:
        """These rows, a copy."""
        return taken(slab, self._rows_from(0, self.num_rows, slab))

    def put(self, slab: Tensor, start: int, rows: Tensor | int) -> None:
        """Write some of these rows of a slab: those from ``start`` on, or a number to the last."""
        end = self.num_rows if isinstance(rows, int) else start + rows.shape[2]
        index = self._rows_from(start, end, slab).flatten()
        if isinstance(rows, int):
            slab.flatten(0, 2).index_fill_(0, index, rows)
        else:
            size = (len(self.entries), slab.shape[1], end - start, *slab.shape[3:])
            whole = rows.to(slab.dtype).expand(size)
            slab.flatten(0, 2).index_copy_(0, index, whole.flatten(0, 2))

    def _rows_from(self, start: int, end: int, slab: Tensor) -> Tensor:
        return self.row_index(torch.arange(start, end, device=self._starts.device), slab)

    def _behind(self, weights: Tensor) -> Tensor:
        rows = self._starts[:, None] + torch.arange(self.num_rows, device=self._starts.device)
        return weights.gather(3, rows[:, None, None].expand(*weights.shape[:3], -1))


def _all_weights(
    entries: Entries, arena: SlabArena, num_rows: int, weights_of: Callable[..., Tensor]
) -> Tensor:
    """Weights of the first rows of entries, those of prompts included."""
    every = EvenSpan(entries, num_rows)
    keys, positions = every.numbers(arena, arena.store.keys), every.read(arena.positions)
    # What is behind the rows of an entry is seen by no query.
    unseen = torch.iinfo(positions.dtype).max
    return weights_of(keys, positions.masked_fill(positions < 0, unseen))
