"""The static decode step: one new token of every sequence, in tensors at fixed addresses.

A step serves the slots ``[0, W)``. From one step to the next only the contents of tensors change:
newest tokens, row counts, positions, live slots. What the host knows of them is a mirror, the
counts of `KVCache`, which it advances without reading.
"""

import torch
from torch import Tensor

from kvpolicy.cache.slab import ATTN_SUMS, KVCache
from kvpolicy.cache.softmax import PLAIN, Softmax
from kvpolicy.kernels.decode import Counts, DecodeSlabs, HeldRows, attend_on_cpu, held_rows


class StaticStep:
    """The decode step of a cache.

    Attributes:
        cache: The KV cache.
        width: Slots that a step serves, ``W``.
        token_ids: Newest token of each slot, ``[S]``, int64.
        seq_len: Tokens seen by each slot, ``[S]``, int64.
        live: Slots that take part, bool ``[S]``.
        rows: Rows held, ``[layers, S, H_kv]``, int64.
    """

    def __init__(self, cache: KVCache) -> None:
        device = cache.layers[0].shape.device
        num_slots = self.width = cache.num_slots
        self.cache = cache
        self.token_ids = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.seq_len = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.live = torch.zeros(num_slots, dtype=torch.bool, device=device)
        num_heads = max(layer.shape.num_kv_heads for layer in cache.layers)
        size = (len(cache.layers), num_slots, num_heads)
        self.rows = torch.zeros(size, dtype=torch.int64, device=device)
        self._slabs: list[DecodeSlabs] = []
        self._held: list[HeldRows | None] = []

    @property
    def position_ids(self) -> Tensor:
        """Position of the new token of each slot, ``[W, 1]``."""
        return self.seq_len[: self.width, None]

    def begin(self, token_ids: Tensor) -> None:
        """Take over what the host knows.

        Args:
            token_ids: The newest tokens of the slots ``[0, W)``, ``[W]``, int64.
        """
        cache, width = self.cache, len(token_ids)
        if width != self.width or not self._slabs:
            self.width = width
            self._slabs = [self._slabs_of(layer_idx) for layer_idx in range(len(cache.layers))]
        self.token_ids[:width] = token_ids
        self.seq_len.copy_(torch.from_numpy(cache.seq_len))
        self.rows.copy_(torch.from_numpy(cache.rows)[..., None].expand_as(self.rows))
        self.live[:width], self.live[width:] = True, False
        self._held = self._read_rows()

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softmax: Softmax = PLAIN,
    ) -> Tensor:
        """Store the new rows of a layer, and attend from them.

        Args:
            layer_idx: Decoder layer, counted from 0.
            query: Queries after RoPE, ``[W, H_q, 1, D]``.
            key: Keys of the new rows, ``[W, H_kv, 1, D]``.
            value: Values of the new rows.
            scaling: Factor on the logits.
            softmax: The layer's softmax.

        Returns:
            ``[W, H_q, 1, D]``.
        """
        layer, width = self.cache.layers[layer_idx], self.width
        layer.softmax = softmax
        dtype, num_heads = layer.shape.dtype, layer.shape.num_kv_heads
        output = attend_on_cpu(
            query[:, :, 0],
            key[:, :, 0].to(dtype),
            value[:, :, 0].to(dtype),
            self._slabs[layer_idx],
            Counts(
                self.rows[layer_idx, :width, :num_heads], self.seq_len[:width], self.live[:width]
            ),
            scaling=scaling,
            softcap=softmax.softcap or 0.0,
            sinks=softmax.sinks,
            sliding_window=layer.shape.sliding_window or 0,
            held=self._held[layer_idx],
        )
        return output[:, :, None]

    def commit(self) -> None:
        """Count the new rows in the host's mirror, after all layers have stored them."""
        self.cache.count(range(self.width), 1)

    def _slabs_of(self, layer_idx: int) -> DecodeSlabs:
        layer, served = self.cache.layers[layer_idx], slice(self.width)
        tracks = {name: track[served] for name, track in layer.tracks.items()}
        return DecodeSlabs(
            layer.keys[served],
            layer.values[served],
            layer.positions[served],
            tuple(tracks.values()),
            tracks.get(ATTN_SUMS),
            None if layer.window is None else layer.window[served],
        )

    def _read_rows(self) -> list[HeldRows | None]:
        """The rows of each layer; layers that hold equally many share what was read."""
        known: dict[tuple[object, ...], HeldRows] = {}
        held: list[HeldRows | None] = []
        for layer_idx, layer in enumerate(self.cache.layers):
            if layer.shape.sliding_window is not None:
                held.append(None)
                continue
            capacity, num_heads = layer.slab.capacity, layer.shape.num_kv_heads
            rows = self.cache.rows[layer_idx, : self.width]
            key = (rows.tobytes(), capacity, num_heads)
            if key not in known:
                counts = self.rows[layer_idx, : self.width, :num_heads]
                known[key] = held_rows(counts, self.live[: self.width], capacity)
            held.append(known[key])
        return held
