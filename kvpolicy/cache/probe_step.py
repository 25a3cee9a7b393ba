"""A forward beside the cache: new tokens that attend to the rows held, and leave no trace.

Their keys and values are in tensors of the step, which end with it. Slabs, tracks, query windows
and counts are read only, so there is nothing to put back.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.layouts.window import seen_in_window
from kvpolicy.cache.slab import KVCache
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
        self._slots = list(slots)
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
        layer = self.cache.layers[layer_idx]
        columns, store = layer.layout.columns(layer, self._slots), layer.store
        keys, values = (
            store.decode(list(map(columns.read, side))) for side in (store.keys, store.values)
        )
        return keys, values

    def visible(self, layer_idx: int) -> Tensor:
        """What each query sees of the rows held, then of its own, bool ``[B, 1 or H_kv, L, N]``."""
        layer = self.cache.layers[layer_idx]
        device, window = layer.shape.device, layer.shape.sliding_window
        columns = layer.layout.columns(layer, self._slots)
        old = columns.present[:, :, None].expand(-1, -1, self._length, -1)
        query = self._num_done + np.arange(self._length)[:, None]  # among its own tokens
        own = np.arange(self._num_done + self._length)
        seen = own <= query
        if window is not None:
            seen = seen & (own > query - window)
            positions = columns.read(layer.positions)
            old = old & seen_in_window(positions, self.position_ids, window)
        new = upload(seen, device).expand(*old.shape[:3], -1)
        return torch.cat([old, new], dim=3)

    def commit(self) -> None:
        """Count the tokens of the forward, after all layers have stored them."""
        self._num_done += self._length

    def discard(self) -> None:
        """Forget the forward: its places are free for the next."""
