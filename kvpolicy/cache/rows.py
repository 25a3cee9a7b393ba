"""The rows of a compaction: the part of the cache that hooks see, and may change at the end."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpolicy.cache.slab import Cache
from kvpolicy.errors import ModelError
from kvpolicy.toolkit.attention_window import observed_weights


class LayerRows:
    """The rows that some slots hold in one layer: what the hooks of a compaction see.

    All slots hold the same number of rows here, so that the tensors have no padding. They show
    all heads of the layer: where several processes have some each, the parts of all are brought
    together as they are asked for, which all processes do alike.
    """

    def __init__(self, cache: Cache, layer_idx: int, slots: Sequence[int]) -> None:
        self._cache = cache
        self._layer = cache.layers[layer_idx]
        self._layer_idx = layer_idx
        self._slots = list(slots)
        self._peers = self._layer.shape.peers
        self._gathered: dict[str, Tensor] = {}
        self.num_rows = int(cache.rows[layer_idx, slots[0]])
        self.seq_len = torch.from_numpy(cache.seq_len[self._slots])
        self.kept: Tensor | None = None
        # A slice is read as a view, a list of slots as a copy: one due sequence, the common
        # case, costs nothing.
        first, last = self._slots[0], self._slots[-1] + 1
        contiguous = self._slots == list(range(first, last))
        self._target: slice | list[int] = slice(first, last) if contiguous else self._slots

    @property
    def keys(self) -> Tensor:
        """Keys after RoPE, ``[B, H_kv, T, D]``."""
        return self._of_all_heads("keys", lambda: self._held(self._layer.keys))

    @property
    def values(self) -> Tensor:
        """Values, ``[B, H_kv, T, D]``."""
        return self._of_all_heads("values", lambda: self._held(self._layer.values))

    @property
    def positions(self) -> Tensor:
        """Place of each row's token in its sequence, ``[B, H_kv, T]``, int64."""
        return self._of_all_heads("positions", lambda: self._held(self._layer.positions))

    @property
    def tracks(self) -> "Tracks":
        """The per-row numbers of these rows, by name."""
        return Tracks(self)

    def track(self, name: str) -> Tensor:
        """One track of these rows, ``[B, H_kv, T]``, fp32."""
        held = self._layer.tracks[name]
        return self._of_all_heads(f"track {name}", lambda: self._held(held))

    def set_track(self, name: str, values: Tensor) -> None:
        """Give these rows new numbers, ``[B, H_kv, T]``."""
        part = self._peers.part(values)
        self._layer.tracks[name][self._target, :, : self.num_rows] = part
        self._gathered.pop(f"track {name}", None)

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query of this layer sees, its own included; ``None``: all."""
        return self._layer.shape.sliding_window

    @property
    def out_of_sight(self) -> Tensor | None:
        """Rows that no later query can see, bool ``[B, H_kv, T]``; ``None`` without a window."""
        if self.sliding_window is None:
            return None
        oldest = self.seq_len.to(self.positions.device) - self.sliding_window
        return self.positions <= oldest[:, None, None]

    @property
    def queries(self) -> Tensor:
        """The last queries after RoPE, oldest first, ``[B, H_q, W, D]``.

        A factor on the logits other than ``D ** -0.5`` is folded into them, so that
        ``queries @ keys.T * D ** -0.5`` are the model's logits.

        Fewer than ``window_size`` if the shortest of the sequences has seen fewer tokens.
        """
        return self._of_all_heads("queries", self._held_queries)

    @property
    def attn_weights(self) -> Tensor:
        """Softmax weights of these queries over the rows they see, ``[B, H_q, W, T]``, fp32."""
        return self._of_all_heads("attn_weights", self._held_weights)

    def keep(
        self, keep: Tensor, *, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        """Make the chosen rows the whole contents of these slots, in place.

        Args:
            keep: Rows that stay, ``[B, H_kv, K]``, int64, rising.
            keys: What to store for their keys instead, ``[B, H_kv, K, D]``.
            values: What to store for their values instead, ``[B, H_kv, K, D]``.
        """
        layer, part = self._layer, self._peers.part
        staying = part(keep)
        wide = staying[..., None].expand(-1, -1, -1, layer.shape.head_dim)
        for slab, others in ((layer.keys, keys), (layer.values, values)):
            rows = self._held(slab).gather(2, wide) if others is None else part(others)
            self._store(slab, rows)
            del rows  # before the next ones are made
        self._store(layer.positions, self._held(layer.positions).gather(2, staying), empty=-1)
        for track in layer.tracks.values():
            self._store(track, self._held(track).gather(2, staying), empty=0)
        self._cache.rows[self._layer_idx, self._slots] = keep.shape[2]
        self._cache.has_gaps[self._layer_idx, self._slots] = True
        self._gathered.clear()
        self.kept = keep

    def rotate(self, keys: Tensor, by: Tensor) -> Tensor:
        """Keys as they would be at other positions, turned as the model turns them.

        Nothing is stored: hand the outcome to `keep`. Positions stay those of the sequence.

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
            msg = "these rows belong to no model, so nothing is known about moving their keys"
            raise ModelError(msg)
        return self._cache.rotate(self._layer_idx, keys, by)

    def _of_all_heads(self, name: str, held: Callable[[], Tensor]) -> Tensor:
        """What this process and its peers hold, ``[B, H, ...]``; gathered once, if it has any."""
        if self._peers.size == 1:
            return held()
        if name not in self._gathered:
            self._gathered[name] = self._peers.all_gather(held())
            self._cache.needed_copy(self._gathered_bytes)
        return self._gathered[name]

    def _held(self, tensor: Tensor) -> Tensor:
        """These rows of a slab, in the heads of this process."""
        return tensor[self._target][:, :, : self.num_rows]

    def _held_queries(self) -> Tensor:
        window = self._layer.window
        assert window is not None, "nobody in this layer's stack asked for queries"
        size = window.shape[2]
        num = min(size, int(self.seq_len.min()))
        order = (self.seq_len[:, None] - num + torch.arange(num)) % size  # [B, W]
        index = order.to(window.device)[:, None, :, None]
        queries = window[self._target]
        return queries.gather(2, index.expand(-1, queries.shape[1], -1, queries.shape[3]))

    def _held_weights(self) -> Tensor:
        return observed_weights(
            self._held_queries(),
            self._held(self._layer.keys),
            self._held(self._layer.positions),
            self.seq_len,
            softmax=self._layer.softmax,
            sliding_window=self.sliding_window,
        )

    @property
    def _gathered_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._gathered.values())

    def _store(self, tensor: Tensor, rows: Tensor, empty: int | None = None) -> None:
        num = rows.shape[2]
        tensor[self._target, :, :num] = rows
        if empty is not None:
            tensor[self._target, :, num : self.num_rows] = empty
        # Slots that are no slice are copied out before the rows are gathered.
        copies = 1 if isinstance(self._target, slice) else 2
        self._cache.needed_copy(copies * rows.nbytes + self._gathered_bytes)


class Tracks:
    """Per-row numbers that travel with the rows, by name, for the rows of one compaction.

    ``tracks["name"]`` is ``[B, H_kv, T]``, fp32, 0 for rows that joined since the last
    compaction; assigning to it gives the rows new numbers. A policy declares the names it
    uses in a class attribute ``tracks``.
    """

    def __init__(self, rows: LayerRows, prefix: str = "") -> None:
        self._rows = rows
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        """The numbers of these rows, ``[B, H_kv, T]``, fp32."""
        return self._rows.track(self._prefix + name)

    def __setitem__(self, name: str, values: Tensor) -> None:
        """Give these rows new numbers, ``[B, H_kv, T]``."""
        self._rows.set_track(self._prefix + name, values)

    def within(self, prefix: str) -> "Tracks":
        """The tracks whose names begin with a prefix, by the rest of their names."""
        return Tracks(self._rows, prefix)
