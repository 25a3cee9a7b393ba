"""A forward beside the cache: new tokens that attend to the rows held, and leave no trace.

Their keys and values are in tensors of the step, which end with it. Slabs, tracks, query windows
and counts are read only, so there is nothing to put back.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.slab import KVCache, slot_index
from kvpolicy.cache.sliding_window import seen_in_window
from kvpolicy.devices import upload


class ProbeStep:
    """Tokens that would follow in some slots, equally many in each, in one forward or in several.

    Attributes:
        cache: The KV cache.
        seq_len: Tokens seen by each slot, ``[B]``.
        num_tokens: Tokens in all, ``P``.
        attended: Layers whose attention was computed in the forward under way.
        queries: For each layer of interest the queries after RoPE, ``[B, H_q, P, D]``, once it was
            computed; scaled as those of a query window.
    """

    def __init__(
        self, cache: KVCache, slots: Sequence[int], num_tokens: int, layers: Collection[int]
    ) -> None:
        """Serve slots; the queries of ``layers`` are of interest."""
        self.cache, self.num_tokens = cache, num_tokens
        self._slots, self._served = list(slots), slot_index(slots)
        self._wanted = frozenset(layers)
        self.seq_len: np.ndarray = cache.seq_len[self._slots]
        self.attended: set[int] = set()
        self.queries: dict[int, Tensor] = {}
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_done = self._length = 0

    def begin(self, length: int) -> None:
        """Begin a forward of so many tokens of each slot."""
        self._length = length
        self.attended.clear()

    @property
    def position_ids(self) -> np.ndarray:
        """Position of each token of the forward, ``[B, L]``."""
        first = self.seq_len[:, None] + self._num_done
        positions: np.ndarray = first + np.arange(self._length)
        return positions

    @property
    def totals(self) -> np.ndarray:
        """Tokens of each slot after the forward, ``[B]``."""
        totals: np.ndarray = self.seq_len + self._num_done + self._length
        return totals

    @property
    def num_bytes(self) -> int:
        """Bytes of its keys, values and queries."""
        rows = [tensor for pair in self._rows.values() for tensor in pair]
        return sum(tensor.nbytes for tensor in (*rows, *self.queries.values()))

    def store(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the rows of one layer, ``[B, H_kv, L, D]``; return those of all tokens so far."""
        dtype = self.cache.layers[layer_idx].shape.dtype
        if layer_idx not in self._rows:
            size = (*keys.shape[:2], self.num_tokens, keys.shape[3])
            self._rows[layer_idx] = (
                keys.new_empty(size, dtype=dtype),
                values.new_empty(size, dtype=dtype),
            )
        own, now = self._rows[layer_idx], slice(self._num_done, self._num_done + self._length)
        for tensor, new in zip(own, (keys, values), strict=True):
            tensor[:, :, now] = new
        return own[0][:, :, : now.stop], own[1][:, :, : now.stop]

    def remember_queries(self, layer_idx: int, queries: Tensor) -> None:
        """Keep the queries of a layer, ``[B, H_q, L, D]``, if they are of interest."""
        if layer_idx not in self._wanted:
            return
        if layer_idx not in self.queries:
            size = (*queries.shape[:2], self.num_tokens, queries.shape[3])
            self.queries[layer_idx] = queries.new_empty(size)
        now = slice(self._num_done, self._num_done + self._length)
        self.queries[layer_idx][:, :, now] = queries

    def held(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows that the slots hold in a layer, ``[B, H_kv, T, D]`` each."""
        layer, num_rows = self.cache.layers[layer_idx], self._num_rows(layer_idx)
        if layer.bounds is None:
            rows = (self._served, slice(None), slice(num_rows))
            return layer.keys[rows], layer.values[rows]
        found = layer.columns(self._served, self.cache.rows[layer_idx, self._slots], num_rows)
        keys, values = (
            layer.gathered(slab, self._served, *found) for slab in (layer.keys, layer.values)
        )
        return keys, values

    def visible(self, layer_idx: int) -> Tensor:
        """What each query sees of the rows held, then of its own, bool ``[B, 1 or H_kv, L, N]``."""
        layer = self.cache.layers[layer_idx]
        device, window = layer.shape.device, layer.shape.sliding_window
        num_rows = self._num_rows(layer_idx)
        rows = self.cache.rows[layer_idx, self._slots]
        if layer.bounds is None:
            is_held = upload(np.arange(num_rows) < rows[:, None], device)[:, None]
        else:
            _, is_held = layer.columns(self._served, rows, num_rows)
        old = is_held[:, :, None].expand(-1, -1, self._length, -1)
        query = self._num_done + np.arange(self._length)[:, None]  # among its own tokens
        own = np.arange(self._num_done + self._length)
        seen = own <= query
        if window is not None:
            seen = seen & (own > query - window)
            positions = layer.positions[self._served, :, :num_rows]
            old = old & seen_in_window(positions, self.position_ids, window)
        new = upload(seen, device).expand(*old.shape[:3], -1)
        return torch.cat([old, new], dim=3)

    def commit(self) -> None:
        """Count the tokens of the forward, after all layers have stored them."""
        self._num_done += self._length

    def _num_rows(self, layer_idx: int) -> int:
        if self.cache.layers[layer_idx].bounds is None:
            return int(self.cache.rows[layer_idx, self._slots].max())
        return int(self.cache.fullest(layer_idx, self._slots).max())
