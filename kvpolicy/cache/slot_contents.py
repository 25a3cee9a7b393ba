"""What one slot holds, as tensors of its own: the rows that are held, and no slab."""

from collections.abc import Iterator, Mapping
from itertools import chain

import attrs
import torch
from torch import Tensor

from kvpolicy.cache.slab import KVCache, LayerCache


@attrs.frozen(eq=False)
class LayerContents:
    """What a slot holds in one layer.

    Attributes:
        keys: Keys after RoPE, ``[H_kv, T, D]``.
        values: Values, ``[H_kv, T, D]``.
        positions: Position of each row's token, ``[H_kv, T]``, int64, strictly rising.
        tracks: Per-row numbers by name, ``[H_kv, T]``, fp32.
        window: The stored queries, ``[H_q, W, D]``, the query at position p at index ``p % W``;
            fewer if the sequence has seen fewer tokens. ``None`` if no policy reads queries.
        compacted_at: Tokens that the sequence had seen at the last compaction of this layer.
        prompt_rows: Rows at the beginning that stay, see `KVCache.prompt_rows`.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    tracks: Mapping[str, Tensor]
    window: Tensor | None
    compacted_at: int
    prompt_rows: int

    @property
    def num_rows(self) -> int:
        """Rows held, ``T``."""
        return self.positions.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        tensors = [self.keys, self.values, self.positions, *self.tracks.values()]
        return tensors if self.window is None else [*tensors, self.window]

    def to(self, device: torch.device) -> "LayerContents":
        """The same on a device."""
        return attrs.evolve(
            self,
            keys=self.keys.to(device),
            values=self.values.to(device),
            positions=self.positions.to(device),
            tracks={name: track.to(device) for name, track in self.tracks.items()},
            window=None if self.window is None else self.window.to(device),
        )


@attrs.frozen(eq=False)
class SlotContents:
    """What a slot holds in all layers.

    Attributes:
        layers: The layers, in order.
        seq_len: Tokens that the sequence has seen.
        prompt_len: Tokens whose rows stay in layers that keep prompts.
    """

    layers: tuple[LayerContents, ...]
    seq_len: int
    prompt_len: int

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors of all layers."""
        return chain.from_iterable(layer.tensors for layer in self.layers)


def copy_slot(cache: KVCache, slot: int) -> SlotContents:
    """A copy of what a slot holds; the slot stays as it is."""
    seq_len = int(cache.seq_len[slot])
    layers = (
        _copy(layer, slot, seq_len, *map(int, counts))
        for layer, *counts in zip(
            cache.layers,
            cache.rows[:, slot],
            cache.compacted_at[:, slot],
            cache.prompt_rows[:, slot],
            strict=True,
        )
    )
    return SlotContents(tuple(layers), seq_len, int(cache.prompt_len[slot]))


def fill_slot(cache: KVCache, slot: int, contents: SlotContents) -> None:
    """Have a slot hold a copy of some contents, and nothing else.

    Args:
        cache: The KV cache; its layers have the shapes, tracks and windows of the contents, and at
            least as many rows for each slot.
        slot: The slot.
        contents: The contents.
    """
    cache.clear(slot)
    cache.seq_len[slot] = contents.seq_len
    cache.prompt_len[slot] = contents.prompt_len
    for layer_idx, (layer, held) in enumerate(zip(cache.layers, contents.layers, strict=True)):
        rows = slice(held.num_rows)
        layer.keys[slot, :, rows] = held.keys
        layer.values[slot, :, rows] = held.values
        layer.positions[slot, :, rows] = held.positions
        for name, track in held.tracks.items():
            layer.tracks[name][slot, :, rows] = track
        if layer.window is not None:
            assert held.window is not None
            layer.window[slot, :, : held.window.shape[1]] = held.window
        cache.rows[layer_idx, slot] = held.num_rows
        cache.compacted_at[layer_idx, slot] = held.compacted_at
        cache.prompt_rows[layer_idx, slot] = held.prompt_rows


def _copy(
    layer: LayerCache, slot: int, seq_len: int, num_rows: int, compacted_at: int, prompt_rows: int
) -> LayerContents:
    rows = slice(num_rows)
    window = None if layer.window is None else layer.window[slot, :, :seq_len].clone()
    return LayerContents(
        layer.keys[slot, :, rows].clone(),
        layer.values[slot, :, rows].clone(),
        layer.positions[slot, :, rows].clone(),
        {name: track[slot, :, rows].clone() for name, track in layer.tracks.items()},
        window,
        compacted_at,
        prompt_rows,
    )
