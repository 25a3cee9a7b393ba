"""Which rows the queries of a forward see: said in a few numbers, not in a mask of all of them.

A query sees the rows up to that of its own token; within an image of some models, those behind it,
too. Most layers hide nothing else, so kernels that are causal need no mask at all. Where more is
hidden, masks are made for some queries at a time.

Shapes: ``B`` sequences, ``L`` token columns, padded on the left, ``H_kv`` KV heads, ``T`` rows:
those of the fullest sequence. A sequence has the first of them, and its newest token the last of
its own.
"""

from collections.abc import Callable
from functools import cached_property

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.devices import upload

# Sequences that differ in length are attended to in one call under a mask of at most so many
# bytes, one for each query and row: a call for each of them would take longer to launch. Larger
# ones get a call each: no pads are computed then, and causal kernels need no mask.
SHARED_MASK_BYTES = 1 << 20

# What else a query must fulfil to see a row: gives a mask of some queries and some rows, bool
# ``[B, 1 or H_kv, l, t]``.
Also = Callable[[slice, slice], Tensor]


@attrs.frozen(eq=False, slots=False)
class Visible:
    """What the queries of a forward see of the rows that a layer attends to.

    Attributes:
        lengths: Tokens of each sequence, ``[B]``; the columns before them are pads.
        num_rows: Rows of each sequence, ``[B]``.
        width: Token columns, ``L``.
        device: Where masks are made.
        reach: How many rows a query sees, its own included; ``None``: all up to its own.
        also: What else hides rows; ``None``: nothing.
        ahead: How many rows behind its own each query sees, ``[B, L]``; ``None``: none.
    """

    lengths: np.ndarray
    num_rows: np.ndarray
    width: int
    device: torch.device
    reach: int | None = None
    also: Also | None = None
    ahead: np.ndarray | None = None
    _kept: dict[tuple[int, int, int, int], Tensor] = attrs.field(
        factory=dict, init=False, repr=False
    )

    @cached_property
    def is_lower_right(self) -> bool:
        """Whether the rows that are seen are those below the diagonal that ends in the last row.

        There are no pads then, and all sequences are alike.
        """
        alike = (self.lengths == self.width).all() and (self.num_rows == self.num_rows[0]).all()
        return bool(alike) and self._is_causal

    @cached_property
    def has_pads(self) -> bool:
        """Whether some column is a pad."""
        return bool((self.lengths < self.width).any())

    @cached_property
    def parts(self) -> list["Part"]:
        """The sequences of each call: neighbours that are alike, or all of them under a mask."""
        pairs = np.stack([self.lengths, self.num_rows])
        starts = [0, *(np.flatnonzero((pairs[:, 1:] != pairs[:, :-1]).any(axis=0)) + 1)]
        mask_bytes = len(self.lengths) * self.width * int(self.num_rows.max())
        if len(starts) == 1 or not self._is_causal or mask_bytes <= SHARED_MASK_BYTES:
            return [Part(slice(None), slice(None), slice(None), self)]
        parts: list[Part] = []
        for start, stop in zip(starts, [*starts[1:], len(self.lengths)], strict=True):
            entries = slice(int(start), int(stop))
            lengths, num_rows = self.lengths[entries], self.num_rows[entries]
            length = int(lengths[0])
            of_part = Visible(lengths, num_rows, length, self.device)
            columns = slice(self.width - length, None)
            parts.append(Part(entries, columns, slice(int(num_rows[0])), of_part))
        return parts

    def rows(self, now: slice) -> slice:
        """Rows outside of which some queries see none."""
        first = 0
        if self.reach is not None:
            first = max(int(self.num_rows.min()) - self.width + now.start - self.reach + 1, 0)
        end = now.stop
        if self.ahead is not None:
            end = int((np.arange(now.start, now.stop) + self.ahead[:, now]).max()) + 1
        return slice(first, int(self.num_rows.max()) - self.width + end)

    def seen_by_all(self, now: slice) -> int:
        """How many of the first rows all of some queries see; 0 if that needs a mask to know."""
        if not self._is_causal:
            return 0
        return max(int(self.num_rows.min()) - self.width + now.start, 0) + 1

    def mask(self, now: slice, rows: slice) -> Tensor | None:
        """Which of some rows each of some queries sees, bool ``[B, 1 or H_kv, l, t]``.

        A pad sees the first row at least, so that its softmax has something to normalise.

        Returns:
            ``None`` if all are seen.
        """
        if self.seen_by_all(now) >= rows.stop:
            return None
        if self.also is not None:
            return self._mask(now, rows) & self.also(now, rows)
        # The last one is kept: if one does for all queries, all layers have it.
        place = (now.start, now.stop, rows.start, rows.stop)
        if place not in self._kept:
            self._kept.clear()
            self._kept[place] = self._mask(now, rows)
        return self._kept[place]

    def real(self, now: slice) -> Tensor:
        """Which of some queries are no pads, bool ``[B, l]``."""
        columns = np.arange(now.start, now.stop)
        return upload(columns >= (self.width - self.lengths)[:, None], self.device)

    def _mask(self, now: slice, rows: slice) -> Tensor:
        """The rows up to that of each query, and within its reach, bool ``[B, 1, l, t]``."""
        queries = torch.arange(now.start, now.stop, device=self.device)[:, None]
        newest = (self._ends - self.width + queries).clamp_(min=0)  # [B, l, 1]
        row = torch.arange(rows.start, rows.stop, device=self.device)
        last = newest
        if self.ahead is not None:
            last = newest + upload(self.ahead[:, now, None], self.device)
        seen = row <= last
        if self.reach is not None:
            seen &= row > newest - self.reach
        return seen[:, None]

    @cached_property
    def _ends(self) -> Tensor:
        """Rows of each sequence, ``[B, 1, 1]``."""
        return upload(self.num_rows[:, None, None], self.device)

    @cached_property
    def sizes(self) -> Tensor:
        """Tokens of each sequence, and its rows, for kernels, ``[2, B]``."""
        return upload(np.stack([self.lengths, self.num_rows]), self.device)

    @property
    def _is_causal(self) -> bool:
        """Whether a query sees all rows up to its own."""
        return self.reach is None and self.also is None and self.ahead is None


@attrs.frozen(eq=False)
class Part:
    """Some sequences of a forward that are attended to in one call.

    Attributes:
        entries: Which of them.
        columns: Their token columns.
        rows: Their rows.
        visible: Which of these rows their queries see.
    """

    entries: slice
    columns: slice
    rows: slice
    visible: Visible
