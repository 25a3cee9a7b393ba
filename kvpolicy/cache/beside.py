"""Rows beside the slabs: of tokens that might follow, in any layout.

Slabs, tracks, rings of queries and counts are read only, so there is nothing to put back.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.exact import with_exact
from kvpolicy.attention.visible import Visible
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.layouts.base import LayerCache, OpenRows
from kvpolicy.cache.layouts.span import Columns
from kvpolicy.cache.layouts.tokens import NewTokens
from kvpolicy.devices import upload


class RowsBeside:
    """Keys and values of tokens that follow those of some slots, of one forward or of several.

    Attributes:
        num_tokens: Tokens of each slot, in all.
        num_done: Tokens whose rows are here, from forwards that are done.
        wanted: Layers whose queries are of interest.
        states: States of fixed size of each layer that has any, as of the forwards that are done.
        queries: For each of them the queries after RoPE, ``[B, H_q, P, D]``, once they are
            computed; scaled as those of a ring.
    """

    def __init__(self, num_tokens: int, wanted: Collection[int]) -> None:
        """Make room for so many tokens of each slot."""
        self.num_tokens, self.num_done = num_tokens, 0
        self.wanted = frozenset(wanted)
        self.states: Mapping[int, Any] = {}
        self.queries: dict[int, Tensor] = {}
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and queries."""
        rows = [tensor for pair in self._rows.values() for tensor in pair]
        return sum(tensor.nbytes for tensor in (*rows, *self.queries.values()))

    def add(self, layer: LayerCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows of a layer, ``[B, H_kv, L, D]``; returns those of all tokens so far."""
        if layer.index not in self._rows:
            size, dtype = (*keys.shape[:2], self.num_tokens), layer.shape.dtype
            self._rows[layer.index] = (
                keys.new_empty(*size, keys.shape[3], dtype=dtype),
                values.new_empty(*size, values.shape[3], dtype=dtype),
            )
        own, now = self._rows[layer.index], self._now(keys)
        for tensor, new in zip(own, (keys, values), strict=True):
            tensor[:, :, now] = new
        return own[0][:, :, : now.stop], own[1][:, :, : now.stop]

    def remember(self, layer: LayerCache, reader: int, queries: Tensor) -> None:
        """Keep the queries of a reader of a layer, ``[B, H_q, L, D]``."""
        if layer.index not in self.queries:
            size = (len(queries), layer.shape.num_heads, self.num_tokens, queries.shape[3])
            self.queries[layer.index] = queries.new_empty(size)
        own = layer.shape.heads_of(reader, self.queries[layer.index])
        own[:, :, :, self._now(queries)] = queries.unflatten(1, own.shape[1:3])

    def _now(self, new: Tensor) -> slice:
        return slice(self.num_done, self.num_done + new.shape[2])


class OpenBeside(OpenRows):
    """A layer during a forward whose new rows are beside the slabs.

    `store` returns the rows beside the slabs, those of forwards before included; `held` has the
    others, which come first in what is visible.
    """

    def __init__(self, layer: LayerCache, tokens: NewTokens, rows: RowsBeside) -> None:
        super().__init__(layer, tokens)
        self._rows, self.remembers = rows, layer.index in rows.wanted
        device, layout = layer.shape.device, layer.layout
        columns = layout.columns(layer, tokens.slots.tolist())
        self.held = self._held(columns)
        own = np.arange(rows.num_done + tokens.width)
        new = torch.ones(1, 1, tokens.width, len(own), dtype=torch.bool, device=device)
        old = columns.present[:, :, None].expand(-1, -1, tokens.width, -1)
        if layout.drops_unseen:
            first = tokens.seq_len[:, None] - rows.num_done
            positions = upload(first + own, device)[:, None]
            old = old & layout.sees(layer.shape, columns.read(layer.positions), tokens)
            new = new & layout.sees(layer.shape, positions, tokens)
        mask = torch.cat([old, new.expand(*old.shape[:3], -1)], dim=3)
        self.visible = Visible(
            tokens.lengths,
            np.full_like(tokens.lengths, mask.shape[3]),
            tokens.width,
            device,
            also=lambda now, seen: mask[:, :, now, seen],
        )

    def _held(self, columns: Columns) -> tuple[Tensor, Tensor]:
        """The rows of the slabs, of which the newest are exact for all tokens that might follow."""
        store, served = self.layer.store, self.tokens.served
        keys, values = store.read(columns.read)
        if store.exact:
            newest = upload(self.layer.layout.counts.seq_len[served] - 1, keys.device)
            positions = columns.read(self.layer.positions)
            keys, values = (
                rows if ring is None else with_exact(rows, positions, ring[served], newest)
                for rows, ring in ((keys, store.keys.exact), (values, store.values.exact))
            )
        return keys, values

    def store(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Hold the new rows beside the slabs; returns all that are there."""
        return self._rows.add(self.layer, keys, values)

    def remember(self, queries: Tensor, reader: int = 0) -> None:
        """Keep the queries, if they are of interest."""
        if self.remembers:
            self._rows.remember(self.layer, reader, queries)

    def receive(self, name: str, received: Tensor) -> None:
        """Rows of slabs receive nothing."""

    def annotate(self, name: str, numbers: Tensor) -> None:
        """Rows beside the slabs have no tracks."""


class StepBeside(EagerStep):
    """A forward of tokens that might follow, equally many in each slot, of which no trace is left.

    Their rows are beside the slabs, together with those of such forwards before; its commit makes
    them rows there.
    """

    def __init__(
        self, cache: KVCache, slots: Sequence[int], length: int, beside: RowsBeside
    ) -> None:
        """Serve slots, with so many tokens each."""
        self._beside = beside
        super().__init__(cache, slots, [length] * len(slots))

    def commit(self) -> None:
        """Count the tokens among those beside the slabs."""
        self._beside.num_done += self.width

    def _seen(self, cache: KVCache, slots: np.ndarray) -> np.ndarray:
        seen: np.ndarray = cache.seq_len[slots] + self._beside.num_done
        return seen

    def _open_states(self) -> Mapping[int, Any]:
        """Copies of those of the slots, which the forwards change one after another."""
        self._beside.states = self._beside.states or super()._open_states()
        return self._beside.states

    def _open(self, layer: LayerCache) -> OpenRows:
        return OpenBeside(layer, self.tokens, self._beside)
