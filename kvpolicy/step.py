"""One forward of the model: which slots it serves, and where its new rows go.

A forward serves the slots ``[first, last)``. Each brings some new tokens; where they bring
different numbers, token columns are padded on the left, so that the last column is always
the newest token. Pads are computed and thrown away: they are never stored or attended to.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache import Cache, LayerCache


@attrs.frozen
class Layout:
    """Where the new rows of a forward go in one layer, and what its queries may see.

    Attributes:
        slots: Slot of each new row, ``[N]``.
        rows: Row of each new row in its slab, ``[N]``.
        positions: Place of each new row's token in its sequence, ``[N]``.
        num_rows: Rows to attend to: those of the fullest slot.
        mask: Rows each query may see, bool ``[B, 1, L, T]``; ``None`` if all see all.
    """

    slots: Tensor
    rows: Tensor
    positions: Tensor
    num_rows: int
    mask: Tensor | None


class Step:
    """The new tokens of one forward, before they are stored."""

    def __init__(self, cache: Cache, first: int, lengths: Sequence[int]) -> None:
        """Serve the slots from ``first`` on, with so many new tokens each (at least 1)."""
        self.cache = cache
        self.first, self.last = first, first + len(lengths)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.width = int(self.lengths.max())
        self.seq_len = cache.seq_len[first : self.last].copy()
        column = np.arange(self.width)[None, :]
        # Number of each column's token among the new ones of its slot, negative for pads.
        self.token = column - (self.width - self.lengths[:, None])  # [B, L]
        self.is_real = self.token >= 0
        self.has_pads = not self.is_real.all()
        self.attended: set[int] = set()  # layers whose attention was computed by us
        self._layouts: dict[tuple[torch.device, bytes], Layout] = {}
        self._window_index: dict[tuple[torch.device, int], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def position_ids(self) -> np.ndarray:
        """Place of every column's token in its sequence, ``[B, L]``, 0 for pads."""
        return np.maximum(self.seq_len[:, None] + self.token, 0)

    def layout(self, layer_idx: int) -> Layout:
        """Where the new rows go in this layer; computed once for layers that hold the same."""
        before = self.cache.rows[layer_idx, self.first : self.last]
        device = self.cache.layers[layer_idx].shape.device
        key = (device, before.tobytes())
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(before, device)
        return self._layouts[key]

    def _lay_out(self, before: np.ndarray, device: torch.device) -> Layout:
        slots, _ = np.nonzero(self.is_real)
        token = self.token[self.is_real]
        after = before + self.lengths
        num_rows = int(after.max())
        # A query sees the old rows and the new ones up to its own; a pad sees the first row,
        # so that its softmax has something to normalise.
        newest = np.maximum(before[:, None] + self.token, 0)  # [B, L]
        mask = None
        if self.width > 1 or not (after == num_rows).all():
            visible = np.arange(num_rows) <= newest[..., None]
            mask = torch.from_numpy(visible)[:, None].to(device)

        def there(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return Layout(
            slots=there(slots + self.first),
            rows=there(before[slots] + token),
            positions=there(self.seq_len[slots] + token),
            num_rows=num_rows,
            mask=mask,
        )

    def store(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new rows of one layer, ``[B, H_kv, L, D]``; return all rows to attend to."""
        layer, layout = self.cache.layers[layer_idx], self.layout(layer_idx)
        layer.keys[layout.slots, :, layout.rows] = self.real(keys)
        layer.values[layout.slots, :, layout.rows] = self.real(values)
        layer.positions[layout.slots, :, layout.rows] = layout.positions[:, None]
        served = slice(self.first, self.last)
        return layer.keys[served, :, : layout.num_rows], layer.values[served, :, : layout.num_rows]

    def real(self, columns: Tensor) -> Tensor:
        """The entries of ``[B, H, L, D]`` that belong to tokens, ``[N, H, D]``."""
        by_token = columns.transpose(1, 2)
        if not self.has_pads:
            return by_token.flatten(0, 1)
        return by_token[torch.from_numpy(self.is_real).to(columns.device)]

    def remember_queries(self, layer: LayerCache, queries: Tensor) -> None:
        """Put the newest queries, ``[B, H_q, L, D]``, into the layer's window."""
        if layer.window is None:
            return
        size, device = layer.slab.window_size, layer.shape.device
        if (device, size) not in self._window_index:
            recent = self.is_real & (self.token >= self.lengths[:, None] - size)
            slots, columns = np.nonzero(recent)
            place = (self.seq_len[slots] + self.token[recent]) % size
            index = [torch.from_numpy(array).to(device) for array in (slots, columns, place)]
            self._window_index[device, size] = (index[0], index[1], index[2])
        slots_, columns_, place_ = self._window_index[device, size]
        layer.window[slots_ + self.first, :, place_] = queries[slots_, :, columns_]

    def commit(self) -> None:
        """Count the new rows, after all layers have stored them."""
        served = slice(self.first, self.last)
        self.cache.rows[:, served] += self.lengths
        self.cache.seq_len[served] += self.lengths
