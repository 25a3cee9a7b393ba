"""The rows of a compaction: the part of the cache that hooks read and that `keep` changes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.cache.slab import KVCache, slot_index
from kvpolicy.cache.softmax import observed_weights
from kvpolicy.errors import ModelError


class LayerRows:
    """The rows of some slots in one layer, as the hooks of a compaction see them.

    All slots hold the same number of rows, so the tensors have no padding.

    Attributes:
        num_rows: Rows that each slot holds, ``T``.
        seq_len: Tokens each sequence has seen, ``[B]``, int64, on the CPU.
        kept: Argument of the last `keep`, ``[B, H_kv, K]``; ``None`` before it.
    """

    def __init__(self, cache: KVCache, layer_idx: int, slots: Sequence[int]) -> None:
        self._cache = cache
        self._layer = cache.layers[layer_idx]
        self._layer_idx = layer_idx
        self._slots = list(slots)
        self.num_rows = int(cache.rows[layer_idx, slots[0]])
        self.seq_len = torch.from_numpy(cache.seq_len[self._slots])
        self.kept: Tensor | None = None
        self._target = slot_index(self._slots)

    @property
    def keys(self) -> Tensor:
        """Keys after RoPE, ``[B, H_kv, T, D]``."""
        return self._held(self._layer.keys)

    @property
    def values(self) -> Tensor:
        """Values, ``[B, H_kv, T, D]``."""
        return self._held(self._layer.values)

    @property
    def positions(self) -> Tensor:
        """Position of each row's token in its sequence, ``[B, H_kv, T]``, int64."""
        return self._held(self._layer.positions)

    @property
    def num_new(self) -> Tensor:
        """Tokens of each sequence since its last compaction in this layer, ``[B]``, int64."""
        before = self._cache.compacted_at[self._layer_idx, self._slots]
        return self.seq_len - torch.from_numpy(before)

    @property
    def tracks(self) -> "Tracks":
        """The tracks of these rows, by name."""
        return Tracks(self)

    def track(self, name: str) -> Tensor:
        """One track of these rows, ``[B, H_kv, T]``, fp32."""
        return self._held(self._layer.tracks[name])

    def set_track(self, name: str, values: Tensor) -> None:
        """Assign new numbers to one track of these rows, ``[B, H_kv, T]``."""
        self._layer.tracks[name][self._target, :, : self.num_rows] = values

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query of this layer sees, its own included; ``None``: all."""
        return self._layer.shape.sliding_window

    @property
    def out_of_sight(self) -> Tensor | None:
        """Rows that no later query can see, bool ``[B, H_kv, T]``; ``None`` without a window."""
        if self.sliding_window is None:
            return None
        positions = self.positions
        oldest = self.seq_len.to(positions.device) - self.sliding_window
        return positions <= oldest[:, None, None]

    @property
    def queries(self) -> Tensor:
        """The last queries after RoPE, oldest first, ``[B, H_q, W, D]``.

        They include any factor on the logits other than ``D ** -0.5``, so that
        ``queries @ keys.T * D ** -0.5`` are the model's logits.

        Fewer than ``window_size`` if the shortest of the sequences has seen fewer tokens.
        """
        window = self._layer.window
        assert window is not None, "no policy of this layer's stack reads queries"
        size = window.shape[2]
        num = min(size, int(self.seq_len.min()))
        order = (self.seq_len[:, None] - num + torch.arange(num)) % size  # [B, W]
        index = order.to(window.device)[:, None, :, None]
        queries = window[self._target]
        return queries.gather(2, index.expand(-1, queries.shape[1], -1, queries.shape[3]))

    @property
    def attn_weights(self) -> Tensor:
        """Softmax weights of these queries over the rows they see, ``[B, H_q, W, T]``, fp32."""
        return observed_weights(
            self.queries,
            self.keys,
            self.positions,
            self.seq_len,
            softmax=self._layer.softmax,
            sliding_window=self.sliding_window,
        )

    def keep(
        self, keep: Tensor, *, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        """Evict all rows but the chosen ones from these slots, in place.

        Args:
            keep: Rows that stay, ``[B, H_kv, K]``, int64, rising.
            keys: Replaces their keys, ``[B, H_kv, K, D]``.
            values: Replaces their values, ``[B, H_kv, K, D]``.
        """
        layer, index = self._layer, self._row_index(keep)
        for slab, replacement in ((layer.keys, keys), (layer.values, values)):
            rows = _taken(slab, index) if replacement is None else replacement
            self._store(slab, rows)
            del rows  # free them before the next ones are made
        self._store(layer.positions, _taken(layer.positions, index), empty=-1)
        for track in layer.tracks.values():
            self._store(track, _taken(track, index), empty=0)
        self._cache.rows[self._layer_idx, self._slots] = keep.shape[2]
        self._cache.compacted_at[self._layer_idx, self._slots] = self._cache.seq_len[self._slots]
        self.kept = keep

    def rotate(self, keys: Tensor, by: Tensor) -> Tensor:
        """Move keys to other positions, with the model's own rotary embedding.

        Nothing is stored: pass the result to `keep`. Positions stay those of the sequence.

        Args:
            keys: Keys of this layer after RoPE, ``[B, H_kv, K, D]``.
            by: Positions to add, ``[B, H_kv, K]``, int64.

        Returns:
            ``[B, H_kv, K, D]``, in the dtype of ``keys``.

        Raises:
            ModelError: If keys of this model cannot be moved: it has no rotary embedding, or
                one that changes with the length.
        """
        if self._cache.rotate is None:
            msg = "these rows belong to no model, so their keys cannot be moved"
            raise ModelError(msg)
        return self._cache.rotate(self._layer_idx, keys, by)

    def _held(self, tensor: Tensor) -> Tensor:
        """These rows of a slab."""
        return tensor[self._target][:, :, : self.num_rows]

    def _row_index(self, keep: Tensor) -> Tensor:
        """Places of rows among those of all slots and heads of a slab, ``[B, H_kv, K]``."""
        num_heads, capacity = self._layer.positions.shape[1:]
        heads = torch.tensor(self._slots)[:, None] * num_heads + torch.arange(num_heads)
        return keep + (heads * capacity)[..., None].to(keep.device)

    def _store(self, tensor: Tensor, rows: Tensor, empty: int | None = None) -> None:
        num = rows.shape[2]
        tensor[self._target, :, :num] = rows
        if empty is not None:
            tensor[self._target, :, num : self.num_rows] = empty
        self._note_copy(rows.nbytes)

    def _note_copy(self, num_bytes: int) -> None:
        self._cache.note_copy(num_bytes)


def _taken(slab: Tensor, index: Tensor) -> Tensor:
    """Rows of a slab by `LayerRows._row_index`: ``[B, H_kv, K, D]``, or without ``D``."""
    # Copies a row at a time, several times as fast as `gather`, which copies single numbers.
    rows = slab.flatten(0, 2).index_select(0, index.flatten())
    return rows.view(*index.shape, *slab.shape[3:])


class Tracks:
    """Per-row numbers that travel with the rows, by name, for the rows of one compaction.

    ``tracks["name"]`` is ``[B, H_kv, T]``, fp32, 0 for rows that joined since the last
    compaction; assign to it to change the numbers. A policy declares the names it uses in a
    class attribute ``tracks``.
    """

    def __init__(self, rows: LayerRows, prefix: str = "") -> None:
        self._rows = rows
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        """The numbers of these rows, ``[B, H_kv, T]``, fp32."""
        return self._rows.track(self._prefix + name)

    def __setitem__(self, name: str, values: Tensor) -> None:
        """Assign new numbers to these rows, ``[B, H_kv, T]``."""
        self._rows.set_track(self._prefix + name, values)

    def within(self, prefix: str) -> "Tracks":
        """The tracks whose names begin with a prefix, by the rest of their names."""
        return Tracks(self._rows, prefix)
