"""The rows of a compaction where the KV heads of a layer share its budget.

Heads hold different numbers of rows, which hooks see aligned on the right: the newest row of each
head is in the last column, and columns that a head has no row for come first. A policy answers
which rows stay as a mask, and the segments of the heads are packed again, side by side
(`kvpolicy.cache.segments`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.attention.softmax import observed_weights
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.segments import packed_bounds, places_of
from kvpolicy.cache.slab import KVCache


def layer_rows(cache: KVCache, layers: int | Sequence[int], slots: Sequence[int]) -> LayerRows:
    """The rows of some slots in layers of one stack."""
    first = layers if isinstance(layers, int) else layers[0]
    ragged = cache.layers[first].slab.ragged
    return (RaggedRows if ragged else LayerRows)(cache, layers, slots)


class RaggedRows(LayerRows):
    """The rows of slots whose heads hold different numbers of rows.

    All entries of the batch axis hold equally many rows in the mean over their heads, and in their
    fullest head, ``T``. Tensors are copies: 0 in columns that a head has no row for.

    Attributes:
        present: Columns that have a row, bool ``[B, H_kv, T]``.
    """

    def __init__(self, cache: KVCache, layers: int | Sequence[int], slots: Sequence[int]) -> None:
        """Take the layer and the slot of each entry; ``layers`` may be one layer for all."""
        super().__init__(cache, layers, slots)
        self._mean_rows = self.num_rows
        self.num_rows = int(cache.fullest(self.layers[0], self._slots[:1])[0])
        assert self._stack.bounds is not None, "slabs of such layers are ragged"
        self._find(self._entries(self._stack.bounds), self._mean_rows)

    @property
    def positions(self) -> Tensor:
        """Position of each row's token in its sequence, ``[B, H_kv, T]``, int64, or -1."""
        return super().positions.masked_fill(~self.present, -1)

    @property
    def absent(self) -> Tensor:
        """Columns that a head has no row for, bool ``[B, H_kv, T]``."""
        return ~self.present

    @property
    def attn_weights(self) -> Tensor:
        """Softmax weights of these queries over the rows they see, ``[B, H_q, W, T]``, fp32."""
        return observed_weights(
            self.queries,
            self.keys,
            self.positions,
            self.seq_len,
            softmax=self._layer.softmax,
            present=self.present,
        )

    def set_track(self, name: str, values: Tensor) -> None:
        """Assign new numbers to one track of these rows, ``[B, H_kv, T]``."""
        track, values = self._stack.tracks[name], self._track_numbers(name, values)
        size = track.shape[1] * track.shape[2]
        # What a head has no row for goes behind the pool.
        places = torch.where(self.present, self._places_of_rows, size).flatten(1)
        pools = self._entries(track).flatten(1)
        wider = torch.cat([pools, pools[:, :1]], dim=1)
        wider.scatter_(1, places, values.flatten(1))
        entries = self._places if self._view is None else self._view
        track[entries] = wider[:, :size].view(-1, *track.shape[1:])

    def keep(
        self, keep: Tensor, *, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        """Evict all rows but the chosen ones from these slots, in place.

        Args:
            keep: Rows that stay, bool ``[B, H_kv, T]``, or int64 ``[B, H_kv, K]``, rising.
            keys: Replaces their keys, in the columns of ``keep``: ``[B, H_kv, T or K, D]``.
            values: Replaces their values, likewise.

        Raises:
            ValueError: As for `LayerRows.keep`.
        """
        keys, values = self._replacements(keep, keys, values)
        stack, capacity = self._stack, self._stack.slab.capacity
        if keep.dtype == torch.bool:
            assert self.budget is not None, "a mask does not say how many rows may stay"
            mask, num_kept = keep, self.budget
        else:
            within = keep.clamp(0, self.num_rows - 1)
            mask = torch.zeros_like(self.present).scatter_(2, within, True)
            keys, values = (_in_columns(new, within, self.num_rows) for new in (keys, values))
            num_kept = keep.shape[2]
        mask = self._fitting(mask & self.present, num_kept)
        counts = mask.sum(dim=2)
        bounds = packed_bounds(counts, capacity - num_kept)
        size = stack.shape.num_kv_heads * capacity
        # Rows that go are moved behind the pool, and then left out.
        targets = bounds[:, :-1, None] + mask.cumsum(dim=2) - 1
        targets = torch.where(mask, targets, size).flatten(1)
        own = torch.arange(size + 1, device=keep.device).expand(len(mask), -1)
        sources = own.scatter(1, targets, self._places_of_rows.flatten(1))[:, :size]
        filled = torch.zeros_like(own, dtype=torch.bool).scatter_(1, targets, True)[:, :size]
        columns = torch.arange(mask[0].numel(), device=keep.device).expand(len(mask), -1)
        column = torch.zeros_like(own).scatter(1, targets, columns)[:, :size]
        for slab, replacement in ((stack.keys, keys), (stack.values, values)):
            moved = self._gathered(slab, sources)
            if replacement is not None:
                index = column[..., None].expand(-1, -1, slab.shape[3])
                new = replacement.flatten(1, 2).gather(1, index)
                moved = torch.where(filled[..., None], new, moved)
            self._put(slab, moved)
        for slab, empty in [(stack.positions, -1), *((one, 0) for one in stack.tracks.values())]:
            self._put(slab, self._gathered(slab, sources).masked_fill_(~filled, empty))
        assert stack.bounds is not None
        self._put(stack.bounds, bounds)
        where = self.layers, self._slots
        self._cache.rows[where] = self._mean_rows = num_kept
        self._cache.compacted_at[where] = self._cache.seq_len[self._slots]
        self._cache.note_leads(*where, counts.amax(dim=1) - num_kept)
        self.kept = keep
        self._find(bounds, num_kept)

    def _find(self, bounds: Tensor, num_rows: int) -> None:
        """Find the places of these rows, counted from the first of their slot."""
        numbers = torch.arange(num_rows - self.num_rows, num_rows, device=bounds.device)
        found = places_of(bounds, self._stack.slab.capacity, numbers)
        self._places_of_rows, self.present = found

    def _fitting(self, mask: Tensor, num_kept: int) -> Tensor:
        """The mask; or the newest rows, where a wrong one, which is known later, would not fit."""
        counts = mask.sum(dim=2)
        fits = (counts.sum(dim=1) <= num_kept * mask.shape[1]) & (counts > 0).all(dim=1)
        newest = torch.arange(self.num_rows, device=mask.device) >= self.num_rows - num_kept
        return torch.where(fits[:, None, None], mask, self.present & newest)

    def _held(self, tensor: Tensor) -> Tensor:
        rows = self._gathered(tensor, self._places_of_rows)
        present = self.present.view(*self.present.shape, *[1] * (rows.dim() - 3))
        return rows.masked_fill_(~present, 0)

    def _gathered(self, tensor: Tensor, places: Tensor) -> Tensor:
        """Rows at some places of the pools of a slab, a copy."""
        size = tensor.shape[1] * tensor.shape[2]
        index = places + (self._places * size).view(-1, *[1] * (places.dim() - 1))
        rows = tensor.flatten(0, 2).index_select(0, index.flatten())
        return rows.reshape(*places.shape, *tensor.shape[3:])

    def _put(self, tensor: Tensor, contents: Tensor) -> None:
        """Replace all that these entries have in a tensor of the stack."""
        entries = self._places if self._view is None else self._view
        tensor[entries] = contents.view(-1, *tensor.shape[1:])
        self._note_copy(contents.nbytes)


def _in_columns(new: Tensor | None, index: Tensor, num_rows: int) -> Tensor | None:
    """Replacements ``[B, H_kv, K, D]`` in the columns of the rows that they replace."""
    if new is None:
        return None
    wide = new.new_zeros(*new.shape[:2], num_rows, new.shape[3])
    return wide.scatter_(2, index[..., None].expand_as(new), new)
