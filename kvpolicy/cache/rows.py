"""The rows of a compaction: the part of the cache that hooks read and that `keep` changes."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.exact import replaced
from kvpolicy.attention.softmax import observed_weights
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.store import StoredRows
from kvpolicy.devices import upload
from kvpolicy.errors import ModelError


class HeldRows(Protocol):
    """What policies are told of rows, wherever these are held; shapes as in `LayerRows`."""

    layers: list[int]
    seq_len: Tensor

    @property
    def keys(self) -> Tensor:
        """Keys after RoPE, ``[B, H_kv, T, D]``."""

    @property
    def values(self) -> Tensor:
        """Values, ``[B, H_kv, T, D]``."""

    @property
    def positions(self) -> Tensor:
        """Position of each row's token in its sequence, ``[B, H_kv, T]``, int64."""

    @property
    def queries(self) -> Tensor:
        """The last queries after RoPE, oldest first, ``[B, H_q, W, D]``."""

    @property
    def attn_weights(self) -> Tensor:
        """Softmax weights of these queries over the rows they see, ``[B, H_q, W, T]``, fp32."""

    @property
    def num_new(self) -> Tensor:
        """Tokens of each sequence since its last compaction in this layer, ``[B]``, int64."""

    @property
    def out_of_sight(self) -> Tensor | None:
        """Rows that no later query can see, bool ``[B, H_kv, T]``; ``None``: there is none."""

    @property
    def absent(self) -> Tensor | None:
        """Columns that a head has no row for, bool ``[B, H_kv, T]``; ``None``: there are none."""

    @property
    def tracks(self) -> "Tracks":
        """The tracks of these rows, by name."""

    def track(self, name: str) -> Tensor:
        """One track of these rows, ``[B, H_kv, T]``, fp32."""

    def set_track(self, name: str, values: Tensor) -> None:
        """Assign new numbers to one track of these rows, ``[B, H_kv, T]``."""


class LayerRows:
    """The rows of some slots in one layer or in several, as the hooks of a compaction see them.

    Each entry of the batch axis is a slot in a layer. All of them hold the same number of rows, so
    the tensors have no padding; layers are of one arena. Nothing here waits for the device.

    Which rows these are is the business of the layers' layout: all that a slot holds, or those
    behind a prompt that stays. If heads hold different numbers of rows, all entries hold equally
    many in the mean over their heads, and in their fullest head, ``T``: then tensors are copies,
    aligned on the right, and 0 in columns that a head has no row for.

    Attributes:
        layers: Decoder layer of each entry, ``[B]``.
        num_rows: Rows of each entry that hooks see, ``T``.
        seq_len: Tokens each sequence has seen, ``[B]``, int64, on the CPU.
        kept: Argument of the last `keep`, ``[B, H_kv, K]``; ``None`` before it.
        is_finite: Whether all that `keep` has stored in place of rows of an entry is finite, bool
            ``[B]`` on the device; ``None``: it was given nothing to store.
        budget: Rows that may stay in each head, or in the mean over heads that share them.
    """

    def __init__(self, cache: KVCache, layers: int | Sequence[int], slots: Sequence[int]) -> None:
        """Take the layer and the slot of each entry; ``layers`` may be one layer for all."""
        self._cache = cache
        self._slots = list(slots)
        self.layers = [layers] * len(self._slots) if isinstance(layers, int) else list(layers)
        self._layer = cache.layers[self.layers[0]]
        self._arena = self._layer.arena
        self._layout = self._layer.layout
        self._span = self._layout.rows(self._layer, self.layers, self._slots)
        self.num_rows = self._span.num_rows
        self._seq_len = cache.seq_len[self._slots]
        self.kept: Tensor | None = None
        self.is_finite: Tensor | None = None
        self.budget: int | None = None
        seq_len = torch.from_numpy(self._seq_len)
        # From pinned memory policies can copy it to the GPU without a wait.
        on_gpu = self._arena.shape.device.type == "cuda"
        self.seq_len = seq_len.pin_memory() if on_gpu else seq_len

    @property
    def prompts(self) -> list[range]:
        """Positions of the rows before these, of each entry: the end of its prompt, or all of it.

        Nothing before them is in sight.
        """
        cache = self._cache
        ends = cache.prompt_len[self._slots].tolist()
        before = cache.prompt_rows[self.layers, self._slots].tolist()
        return [range(end - num, end) for end, num in zip(ends, before, strict=True)]

    @property
    def keys(self) -> Tensor:
        """Keys after RoPE, ``[B, H_kv, T, D]``."""
        return self._decoded(self._arena.store.keys)

    @property
    def values(self) -> Tensor:
        """Values, ``[B, H_kv, T, D]``."""
        return self._decoded(self._arena.store.values)

    @property
    def positions(self) -> Tensor:
        """Position of each row's token in its sequence, ``[B, H_kv, T]``, int64; -1: no row."""
        return self._span.read(self._arena.positions)

    @property
    def num_new(self) -> Tensor:
        """Tokens of each sequence since its last compaction in this layer, ``[B]``, int64.

        Before the first: all of them, or those behind a prompt that stays.
        """
        before = self._cache.compacted_at[self.layers, self._slots]
        staying = self._layout.num_staying(self._slots)
        return self.seq_len - torch.from_numpy(np.maximum(before, staying))

    @property
    def tracks(self) -> "Tracks":
        """The tracks of these rows, by name."""
        return Tracks(self)

    def track(self, name: str) -> Tensor:
        """One track of these rows, ``[B, H_kv, T]``, fp32."""
        return self._span.read(self._arena.tracks[name])

    def set_track(self, name: str, values: Tensor) -> None:
        """Assign new numbers to one track of these rows, ``[B, H_kv, T]``."""
        track = self._arena.tracks[name]
        size = [len(self._slots), track.shape[1], self.num_rows]
        numbers = checked_numbers(f"track '{name}' was given", values, size, track)
        self._span.write(track, numbers)

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query of this layer sees, its own included; ``None``: all."""
        return self._arena.shape.sliding_window

    @property
    def out_of_sight(self) -> Tensor | None:
        """Rows that no later query can see, bool ``[B, H_kv, T]``; ``None`` without a window."""
        if not self._layout.drops_unseen:
            return None
        return self._layout.out_of_sight(self._arena.shape, self.positions, self._seq_len)

    @property
    def absent(self) -> Tensor | None:
        """Columns that a head has no row for, bool ``[B, H_kv, T]``; ``None``: there are none."""
        return self._span.absent

    @property
    def queries(self) -> Tensor:
        """The last queries after RoPE, oldest first, ``[B, H_q, W, D]``.

        They include any factor on the logits other than ``D ** -0.5``, so that
        ``queries @ keys.T * D ** -0.5`` are the model's logits.

        Fewer than ``window_size`` if the shortest of the sequences has seen fewer tokens.
        """
        window = self._arena.window
        assert window is not None, "no policy of this layer reads queries"
        size = window.shape[2]
        num = min(size, int(self._seq_len.min()))
        order = (self._seq_len[:, None] - num + np.arange(num)) % size  # [B, W]
        index = upload(order, window.device)[:, None, :, None]
        queries = self._span.entries.of(window)
        return queries.gather(2, index.expand(-1, queries.shape[1], -1, queries.shape[3]))

    @property
    def attn_weights(self) -> Tensor:
        """Softmax weights of these queries over the rows they see, ``[B, H_q, W, T]``, fp32.

        Rows of a prompt that stays have a share of the softmax, too, and are then left out.
        """
        weights_of = partial(
            observed_weights,
            self.queries,
            seq_len=self.seq_len,
            softmax=self._layer.softmax,
            sliding_window=self.sliding_window,
        )
        return self._span.observed(self._arena, weights_of)

    def keep(
        self, keep: Tensor, *, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        """Evict all rows but the chosen ones from these slots, in place.

        Args:
            keep: Rows that stay, ``[B, H_kv, K]``, int64, rising; where heads share the budget also
                bool ``[B, H_kv, T]``.
            keys: Replaces their keys, in the columns of ``keep``: ``[B, H_kv, K or T, D]``.
            values: Replaces their values, likewise.

        Raises:
            ValueError: Replacements have another shape or device, or are no floating point
                numbers; or rows were evicted before.
        """
        if self.kept is not None:
            msg = (
                "rows.keep() was called twice in one eviction; call it once, and return True after "
                "it, so that nobody else is asked"
            )
            raise ValueError(msg)
        cache = self._cache
        new_keys, new_values = self._replacements(keep, keys, values)
        self._replace_exact(keep, new_keys, new_values)
        kept = self._span.keep(self._arena, keep, new_keys, new_values, self.budget)
        where = self.layers, self._slots
        cache.rows[where] = cache.prompt_rows[where] + kept.num_rows
        cache.compacted_at[where] = self._seq_len
        self._note_copy(kept.copied_bytes)
        self.kept = keep

    def _replace_exact(self, keep: Tensor, keys: Tensor | None, values: Tensor | None) -> None:
        """Replace exact copies of rows that stay, as the rows are."""
        store, entries = self._arena.store, self._span.entries
        for stored, new in ((store.keys, keys), (store.values, values)):
            if stored.exact is not None and new is not None:
                positions = self._span.read(self._arena.positions)  # of this process's heads
                if keep.dtype == torch.bool:
                    positions = positions.masked_fill(~keep, -1)
                else:
                    positions = positions.gather(2, keep.clamp(0, self.num_rows - 1))
                ring = replaced(entries.of(stored.exact), positions, new, entries.newest)
                stored.exact[entries.index] = ring

    def _replacements(
        self, keep: Tensor, keys: Tensor | None, values: Tensor | None
    ) -> list[Tensor | None]:
        """Replacements of keys and values in the model's precision, checked."""
        found: list[Tensor | None] = []
        shape = self._arena.shape
        like = torch.empty(0, dtype=shape.dtype, device=shape.device)
        sides = (("keys", keys, shape.head_dim), ("values", values, shape.value_dim))
        for name, given, dim in sides:
            if given is not None:
                size = [*keep.shape, dim]
                given = checked_numbers(f"rows.keep() was given {name}", given, size, like)
                finite = given.isfinite()
                if keep.dtype == torch.bool:  # in the other columns there may be anything
                    finite = finite | ~keep[..., None]
                before, self.is_finite = self.is_finite, finite.flatten(1).all(dim=1)
                self.is_finite = self.is_finite if before is None else self.is_finite & before
            found.append(given)
        return found

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
                one that changes with the length; or images have positions of their own.
        """
        if self._cache.rotate is None:
            msg = "these rows belong to no model, so their keys cannot be moved"
            raise ModelError(msg)
        if self._cache.rope_offset[self._slots].any():
            msg = (
                "keys cannot be moved behind an image whose tokens have rotary positions of their "
                "own; leave out the policy that moves them"
            )
            raise ModelError(msg)
        (layer_idx,) = set(self.layers)  # rows are evicted layer by layer where a policy does it
        return self._cache.rotate(layer_idx, keys, by)

    def _decoded(self, stored: StoredRows) -> Tensor:
        """These rows, keys or values, as they are read."""
        rows = self._span.numbers(self._arena, stored)
        if stored.bits:
            self._note_copy(rows.nbytes)
        return rows

    def _note_copy(self, num_bytes: int) -> None:
        self._cache.counts.note_copy(num_bytes)


def checked_numbers(what: str, given: object, size: Sequence[int], like: Tensor) -> Tensor:
    """Numbers that a policy wants stored, in the dtype of what stores them.

    Args:
        what: What they are, the beginning of a sentence.
        given: The numbers.
        size: The size that they must have.
        like: What stores them.

    Raises:
        ValueError: They are no tensor of floating point numbers of this size on the same device.
    """
    problem = None
    if not isinstance(given, Tensor):
        problem = type(given).__name__
    elif list(given.shape) != list(size):
        problem = f"shape {list(given.shape)}"
    elif not (given.is_floating_point() or given.dtype == like.dtype):
        problem = str(given.dtype)
    elif given.device != like.device:
        problem = f"a tensor on {given.device}"
    if problem is None:
        assert isinstance(given, Tensor)
        return given.to(like.dtype)
    msg = f"{what} {problem}; expected floating point numbers {list(size)} on {like.device}"
    raise ValueError(msg)


class Tracks:
    """Per-row numbers that travel with the rows, by name, for the rows of one compaction.

    ``tracks["name"]`` is ``[B, H_kv, T]``, fp32, for rows that joined since the last compaction
    what `annotate` has given them, else 0; assign to it to change the numbers. A policy declares
    the names it uses in a class attribute ``tracks``.
    """

    def __init__(self, rows: HeldRows, prefix: str = "") -> None:
        self._rows = rows
        self._prefix = prefix

    @property
    def layers(self) -> list[int]:
        """Decoder layer of each entry of the batch axis, ``[B]``."""
        return self._rows.layers

    def __getitem__(self, name: str) -> Tensor:
        """The numbers of these rows, ``[B, H_kv, T]``, fp32."""
        return self._rows.track(self._prefix + name)

    def __setitem__(self, name: str, values: Tensor) -> None:
        """Assign new numbers to these rows, ``[B, H_kv, T]``."""
        self._rows.set_track(self._prefix + name, values)

    def within(self, prefix: str) -> "Tracks":
        """The tracks whose names begin with a prefix, by the rest of their names."""
        return Tracks(self._rows, prefix)
