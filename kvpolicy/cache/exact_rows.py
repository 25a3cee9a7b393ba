"""Forwards over rows in few bits whose newest are exact, see `kvpolicy.attention.exact`.

The rows of a layer are in its layout, as integers, and the exact copies beside them. Each query of
a forward sees either of a row: the copy if it is near enough, else what the integers stand for.
"""

from functools import partial
from operator import setitem

import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.exact import newest_columns, taken_columns
from kvpolicy.attention.visible import Visible
from kvpolicy.cache.layouts.base import OpenRows
from kvpolicy.cache.store import StoredRows
from kvpolicy.devices import upload


class OpenExact(OpenRows):
    """A layer during a forward: around what its layout has opened, whose rows are integers.

    Attended to are the rows of the layout, and behind them copies of those that some query sees
    exactly.
    """

    def __init__(self, inner: OpenRows) -> None:
        super().__init__(inner.layer, inner.tokens)
        self._inner = inner
        self._columns = torch.empty(0)  # of the rows that some query sees exactly, [B, H_kv, K]

    def store(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new rows; returns copies of all that are attended to."""
        layer, tokens, size = self.layer, self.tokens, self.layer.slab.exact
        held = self._inner.store(keys, values)
        positions = self._inner.positions
        # No query sees an older row exactly: the oldest has as many before it as a ring has.
        at, self._columns = newest_columns(positions, size + tokens.width - 1)
        sides = zip((layer.store.keys, layer.store.values), held, (keys, values), strict=True)
        all_keys, all_values = (self._joined(*side, at) for side in sides)
        copied = sum(one.nbytes for one in (*held, all_keys, all_values))
        layer.layout.counts.note_copy(copied + tokens.beside_bytes)
        self.visible = self._seen(positions, at)
        return all_keys, all_values

    def receive(self, name: str, received: Tensor) -> None:
        """Note what rows have received, as integers and as copies."""
        num = received.shape[2] - self._columns.shape[2]
        of_rows, of_copies = received.split([num, self._columns.shape[2]], dim=2)
        self._inner.receive(name, of_rows.scatter_add(2, self._columns, of_copies))

    def annotate(self, name: str, numbers: Tensor) -> None:
        """Note numbers of the new rows."""
        self._inner.annotate(name, numbers)

    def remember(self, queries: Tensor, reader: int = 0) -> None:
        """Note queries."""
        self._inner.remember(queries, reader)

    def commit(self) -> None:
        """Make what has been noted part of the slots and of the rings."""
        self._inner.commit()
        super().commit()

    def discard(self) -> None:
        """Forget the new rows."""
        self._inner.discard()
        super().discard()

    def _joined(self, stored: StoredRows, rows: Tensor, new: Tensor, at: Tensor) -> Tensor:
        """Rows of the layout, and those at some positions, ``[B, H_kv, K]``, that are exact."""
        ring, tokens = stored.exact, self.tokens
        if ring is None:  # this side has numbers that are read alike
            return torch.cat([rows, taken_columns(rows, self._columns)], dim=2)
        size, new = ring.shape[2], new.to(ring.dtype)
        seen, before = (
            upload(numbers, at.device)[:, None, None]
            for numbers in (tokens.seq_len, tokens.width - tokens.lengths)
        )
        places = torch.where(at < seen, at.clamp(min=0) % size, at - seen + before + size)
        exact = taken_columns(torch.cat([ring[tokens.served_on(ring.device)], new], dim=2), places)
        # The rings are those of the tokens before until the commit.
        sequences, columns, slots, into = tokens.newest(size, ring.device)
        newest = new[sequences, :, columns]
        tokens.beside_bytes += newest.nbytes
        self._at_commit.append(partial(setitem, ring, (slots, slice(None), into), newest))
        return torch.cat([rows, exact], dim=2)

    def _seen(self, positions: Tensor, at: Tensor) -> Visible:
        """What queries see of the rows of the layout, then of those that are exact."""
        tokens, size, columns = self.tokens, self.layer.slab.exact, self._columns
        num_rows, device = positions.shape[2], positions.device
        # A pad sees what it sees without rings.
        queries = np.where(tokens.is_real, tokens.position_ids, np.iinfo(np.int64).max)
        oldest = upload(queries - size + 1, device)[:, None, :, None]
        of_rows = self._inner.visible

        def also(now: slice, seen: slice) -> Tensor:
            mask = of_rows.mask(now, slice(0, num_rows))
            if mask is None:
                mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
            mask = mask.expand(*positions.shape[:2], now.stop - now.start, num_rows)
            index = columns[:, :, None].expand(-1, -1, mask.shape[2], -1)
            far = mask & (positions[:, :, None] < oldest[:, :, now])
            near = mask.gather(3, index) & (at[:, :, None] >= oldest[:, :, now])
            return torch.cat([far, near], dim=3)[..., seen]

        every = np.full_like(tokens.lengths, num_rows + columns.shape[2])
        sizes = tokens.lengths, every, tokens.width
        return Visible(*sizes, device, also=also, ahead=tokens.ahead)
