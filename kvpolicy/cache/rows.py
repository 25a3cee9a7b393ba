"""The rows of a compaction: the part of the cache that hooks read and that `keep` changes.

Where the rows of prompts stay, a compaction has those behind them: no hook sees the others.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.base import Compact
from kvpolicy.attention.choose import backend_for
from kvpolicy.attention.softmax import observed_weights
from kvpolicy.cache.slab import KVCache, slot_index
from kvpolicy.devices import upload
from kvpolicy.errors import ModelError

# Makes the kept rows of a slab the first of their entries. Those behind them receive a number, if
# one is given.
_Move = Callable[[Tensor, int | None], None]


class HeldRows(Protocol):
    """What policies are told of rows, wherever these are held; shapes as in `LayerRows`."""

    layers: list[int]
    seq_len: Tensor
    probe_queries: Tensor | None

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
    the tensors have no padding; layers are of one stack. Nothing here waits for the device.

    If the rows of prompts stay, these are the rows behind them, ``T`` of each entry. They begin at
    another row of the slab for each prompt: then what is read is a copy.

    Attributes:
        layers: Decoder layer of each entry, ``[B]``.
        num_rows: Rows that each entry holds, ``T``, without those of a prompt that stays.
        num_before: Rows before them, ``[B]``: those of a prompt that stays, or 0.
        seq_len: Tokens each sequence has seen, ``[B]``, int64, on the CPU.
        probe_queries: Queries of tokens that might follow, ``[B, H_q, P, D]``; ``None``: no policy
            has asked for any.
        kept: Argument of the last `keep`, ``[B, H_kv, K]``; ``None`` before it.
        is_finite: Whether all that `keep` has stored in place of rows is finite, a bool on the
            device; ``None``: it was given nothing to store.
        budget: Rows that may stay in each head, or in the mean over heads that share them.
    """

    def __init__(self, cache: KVCache, layers: int | Sequence[int], slots: Sequence[int]) -> None:
        """Take the layer and the slot of each entry; ``layers`` may be one layer for all."""
        self._cache = cache
        self._slots = list(slots)
        self.layers = [layers] * len(self._slots) if isinstance(layers, int) else list(layers)
        self._layer = cache.layers[self.layers[0]]
        self._stack = self._layer.stack
        self.num_before: np.ndarray = cache.prompt_rows[self.layers, self._slots]
        self.num_rows = int(cache.rows[self.layers[0], self._slots[0]] - self.num_before[0])
        self._seq_len = cache.seq_len[self._slots]
        self.probe_queries: Tensor | None = None
        self.kept: Tensor | None = None
        self.is_finite: Tensor | None = None
        self.budget: int | None = None
        pairs = zip(self.layers, self._slots, strict=True)
        places = slot_index([cache.layers[layer].first + slot for layer, slot in pairs])
        device = self._stack.shape.device
        seq_len = torch.from_numpy(self._seq_len)
        # From pinned memory policies can copy it to the GPU without a wait.
        self.seq_len = seq_len.pin_memory() if device.type == "cuda" else seq_len
        self._places: Tensor  # of the entries in the stack, [B]
        self._view: slice | None = None  # the same, if they are in equal steps
        if isinstance(places, slice):
            self._view = places
            self._places = torch.arange(places.start, places.stop, places.step, device=device)
        else:
            self._places = upload(np.array(places), device)
        # Of the first of these rows in the slabs: of all entries, or of each, [B].
        self._start: int | Tensor = int(self.num_before[0])
        if (self.num_before != self._start).any():
            self._start = upload(self.num_before, device)

    @property
    def prompts(self) -> list[range]:
        """Positions of the rows before these, of each entry: the end of its prompt, or all of it.

        Nothing before them is in sight.
        """
        ends = self._cache.prompt_len[self._slots].tolist()
        return [range(end - num, end) for end, num in zip(ends, self.num_before, strict=True)]

    @property
    def keys(self) -> Tensor:
        """Keys after RoPE, ``[B, H_kv, T, D]``."""
        return self._held(self._stack.keys)

    @property
    def values(self) -> Tensor:
        """Values, ``[B, H_kv, T, D]``."""
        return self._held(self._stack.values)

    @property
    def positions(self) -> Tensor:
        """Position of each row's token in its sequence, ``[B, H_kv, T]``, int64."""
        return self._held(self._stack.positions)

    @property
    def num_new(self) -> Tensor:
        """Tokens of each sequence since its last compaction in this layer, ``[B]``, int64.

        Before the first: all of them, or those behind a prompt that stays.
        """
        cache = self._cache
        before = cache.compacted_at[self.layers, self._slots]
        staying = cache.prompt_len[self._slots] * cache.keeps_prompt[self.layers]
        return self.seq_len - torch.from_numpy(np.maximum(before, staying))

    @property
    def tracks(self) -> "Tracks":
        """The tracks of these rows, by name."""
        return Tracks(self)

    def track(self, name: str) -> Tensor:
        """One track of these rows, ``[B, H_kv, T]``, fp32."""
        return self._held(self._stack.tracks[name])

    def set_track(self, name: str, values: Tensor) -> None:
        """Assign new numbers to one track of these rows, ``[B, H_kv, T]``."""
        self._write(self._stack.tracks[name], 0, self._track_numbers(name, values))

    def _track_numbers(self, name: str, values: Tensor) -> Tensor:
        """Numbers for a track, checked."""
        size = [len(self._slots), self._stack.positions.shape[1], self.num_rows]
        return checked_numbers(f"track '{name}' was given", values, size, self._stack.tracks[name])

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query of this layer sees, its own included; ``None``: all."""
        return self._stack.shape.sliding_window

    @property
    def out_of_sight(self) -> Tensor | None:
        """Rows that no later query can see, bool ``[B, H_kv, T]``; ``None`` without a window."""
        if self.sliding_window is None:
            return None
        positions = self.positions
        oldest = upload(self._seq_len - self.sliding_window, positions.device)
        return positions <= oldest[:, None, None]

    @property
    def absent(self) -> Tensor | None:
        """Columns that a head has no row for, bool ``[B, H_kv, T]``; ``None``: there are none."""
        return None

    @property
    def queries(self) -> Tensor:
        """The last queries after RoPE, oldest first, ``[B, H_q, W, D]``.

        They include any factor on the logits other than ``D ** -0.5``, so that
        ``queries @ keys.T * D ** -0.5`` are the model's logits.

        Fewer than ``window_size`` if the shortest of the sequences has seen fewer tokens.
        """
        window = self._stack.window
        assert window is not None, "no policy of this layer's stack reads queries"
        size = window.shape[2]
        num = min(size, int(self._seq_len.min()))
        order = (self._seq_len[:, None] - num + np.arange(num)) % size  # [B, W]
        index = upload(order, window.device)[:, None, :, None]
        queries = self._entries(window)
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
        if not self.num_before.any():
            return weights_of(self.keys, self.positions)
        num = int(self.num_before.max()) + self.num_rows
        stack = self._stack
        keys, positions = (self._entries(one[:, :, :num]) for one in (stack.keys, stack.positions))
        # What is behind the rows of an entry is seen by no query.
        unseen = torch.iinfo(positions.dtype).max
        weights = weights_of(keys, positions.masked_fill(positions < 0, unseen))
        start = self._start
        if isinstance(start, int):
            return weights[..., start:]
        rows = start[:, None] + torch.arange(self.num_rows, device=start.device)
        return weights.gather(3, rows[:, None, None].expand(*weights.shape[:3], -1))

    def keep(
        self, keep: Tensor, *, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        """Evict all rows but the chosen ones from these slots, in place.

        Args:
            keep: Rows that stay, ``[B, H_kv, K]``, int64, rising.
            keys: Replaces their keys, ``[B, H_kv, K, D]``.
            values: Replaces their values, ``[B, H_kv, K, D]``.

        Raises:
            ValueError: Replacements have another shape or device, or are no floating point
                numbers.
        """
        stack = self._stack
        keys, values = self._replacements(keep, keys, values)
        # An index that is wrong, which may be known only later, must not reach other slots.
        within = keep.clamp(0, self.num_rows - 1)
        compact = backend_for(keep.device, stack.keys.dtype).compact
        move = self._by_copy(within) if compact is None else self._in_place(within, compact)
        for slab, replacement in ((stack.keys, keys), (stack.values, values)):
            if replacement is None:
                move(slab, None)
            else:
                self._store(slab, replacement)
        move(stack.positions, -1)
        for track in stack.tracks.values():
            move(track, 0)
        counts = self.layers, self._slots
        self._cache.rows[counts] = self.num_before + keep.shape[2]
        self._cache.compacted_at[counts] = self._cache.seq_len[self._slots]
        self.kept = keep

    def _replacements(
        self, keep: Tensor, keys: Tensor | None, values: Tensor | None
    ) -> list[Tensor | None]:
        """Replacements of keys and values as the slabs store them, checked."""
        found: list[Tensor | None] = []
        for name, slab, given in (
            ("keys", self._stack.keys, keys),
            ("values", self._stack.values, values),
        ):
            if given is not None:
                size = [*keep.shape, slab.shape[3]]
                given = checked_numbers(f"rows.keep() was given {name}", given, size, slab)
                finite = given.isfinite()
                if keep.dtype == torch.bool:  # in the other columns there may be anything
                    finite = finite | ~keep[..., None]
                before, self.is_finite = self.is_finite, finite.all()
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
                one that changes with the length.
        """
        if self._cache.rotate is None:
            msg = "these rows belong to no model, so their keys cannot be moved"
            raise ModelError(msg)
        (layer_idx,) = set(self.layers)  # rows are evicted layer by layer where a policy does it
        return self._cache.rotate(layer_idx, keys, by)

    def _held(self, tensor: Tensor) -> Tensor:
        """These rows of a slab."""
        start = self._start
        if isinstance(start, int):
            return self._entries(tensor[:, :, start : start + self.num_rows])
        return self._taken(tensor, self._rows_from(0, self.num_rows))

    def _entries(self, tensor: Tensor) -> Tensor:
        """These entries of a tensor of the stack; a view if they are in equal steps."""
        return tensor.index_select(0, self._places) if self._view is None else tensor[self._view]

    def _in_place(self, keep: Tensor, compact: Compact) -> _Move:
        """Moves rows within their slab."""
        num_kept = keep.new_full(keep.shape[:2], keep.shape[2])
        num_rows = torch.full_like(num_kept, self.num_rows)
        start: Tensor | None = None
        if self.num_before.any():
            start = torch.zeros_like(self._places) + self._start

        def move(slab: Tensor, empty: int | None) -> None:
            compact(slab, keep, self._places, num_kept, num_rows, empty or 0, start=start)

        return move

    def _by_copy(self, keep: Tensor) -> _Move:
        """Moves rows by way of a copy."""
        index = self._row_index(keep)

        def move(slab: Tensor, empty: int | None) -> None:
            self._store(slab, self._taken(slab, index), empty)

        return move

    def _taken(self, slab: Tensor, index: Tensor) -> Tensor:
        """Rows of a slab by their places, see `_row_index`, a copy."""
        # Copies a row at a time, several times as fast as `gather`, which copies numbers.
        rows = slab.flatten(0, 2).index_select(0, index.flatten())
        return rows.reshape(*index.shape, *slab.shape[3:])

    def _row_index(self, keep: Tensor) -> Tensor:
        """Places of rows among those of all entries and heads of a slab, ``[B, H_kv, K]``."""
        num_heads, capacity = self._stack.positions.shape[1:]
        heads = torch.arange(num_heads, device=keep.device)
        first = (self._places[:, None] * num_heads + heads) * capacity
        start = self._start if isinstance(self._start, int) else self._start[:, None]
        return keep + (first + start)[..., None]

    def _rows_from(self, start: int, end: int) -> Tensor:
        """Places of some of these rows, see `_row_index`."""
        return self._row_index(torch.arange(start, end, device=self._places.device))

    def _store(self, tensor: Tensor, rows: Tensor, empty: int | None = None) -> None:
        self._write(tensor, 0, rows)
        if empty is not None:
            self._write(tensor, rows.shape[2], empty)
        self._note_copy(rows.nbytes)

    def _write(self, tensor: Tensor, start: int, rows: Tensor | int) -> None:
        """Write some of these rows of a slab, those from ``start`` on."""
        end = self.num_rows if isinstance(rows, int) else start + rows.shape[2]
        if isinstance(self._start, int):
            entries = self._places if self._view is None else self._view
            tensor[entries, :, self._start + start : self._start + end] = rows
            return
        index = self._rows_from(start, end).flatten()
        if isinstance(rows, int):
            tensor.flatten(0, 2).index_fill_(0, index, rows)
        else:
            size = (len(self._slots), tensor.shape[1], end - start, *tensor.shape[3:])
            whole = rows.to(tensor.dtype).expand(size)
            tensor.flatten(0, 2).index_copy_(0, index, whole.flatten(0, 2))

    def _note_copy(self, num_bytes: int) -> None:
        self._cache.note_copy(num_bytes)


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
    what `mark` has given them, else 0; assign to it to change the numbers. A policy declares the
    names it uses in a class attribute ``tracks``.
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
