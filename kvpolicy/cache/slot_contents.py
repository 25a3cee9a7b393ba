"""What one slot holds, as tensors of its own: the rows that are held, and no slab."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import attrs
import torch
from torch import Tensor

from kvpolicy.cache.ragged_rows import layer_rows
from kvpolicy.cache.segments import packed_bounds, places_of
from kvpolicy.cache.slab import KVCache


@attrs.frozen(eq=False)
class LayerContents:
    """What a slot holds in one layer.

    Where heads share their rows, ``T`` is that of the fullest head, and columns that a head has no
    row for come first, with position -1 and 0 elsewhere.

    Attributes:
        keys: Keys after RoPE, ``[H_kv, T, D]``.
        values: Values, ``[H_kv, T, D]``.
        positions: Position of each row's token, ``[H_kv, T]``, int64, strictly rising.
        tracks: Per-row numbers by name, ``[H_kv, T]``, fp32.
        window: The stored queries, ``[H_q, W, D]``, the query at position p at index ``p % W``;
            fewer if the sequence has seen fewer tokens. ``None`` if no policy reads queries.
        compacted_at: Tokens that the sequence had seen at the last compaction of this layer.
        prompt_rows: Rows at the beginning that stay, see `KVCache.prompt_rows`.
        rows: Rows of a head; in the mean, as `KVCache` counts them, if heads share them.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    tracks: Mapping[str, Tensor]
    window: Tensor | None
    compacted_at: int
    prompt_rows: int
    rows: int

    @property
    def num_rows(self) -> int:
        """Rows of the fullest head, ``T``."""
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


def copy_slot(
    cache: KVCache,
    slot: int,
    newest: Sequence[int | None] | None = None,
    seen: int | None = None,
) -> SlotContents:
    """A copy of what a slot holds; the slot stays as it is.

    Args:
        cache: The KV cache.
        slot: The slot.
        newest: How many of its newest rows to copy in each layer; ``None``: all. Where heads share
            the rows of a layer, these must have come since its last compaction. Accumulators are
            copied for all rows in any case, because those of older rows have changed, too.
        seen: Leave out the tokens from this one on. They must have brought a row into each layer,
            none may have left it since, and the layers must have neither accumulators nor queries.
    """
    nums = [None] * len(cache.layers) if newest is None else newest
    seq_len = int(cache.seq_len[slot]) if seen is None else seen
    layers = (_copy(cache, layer_idx, slot, num, seq_len) for layer_idx, num in enumerate(nums))
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
        tracks = [held.tracks[name] for name in layer.tracks]
        contents_of = [held.keys, held.values, held.positions, *tracks]
        for slab, rows in zip(layer.slabs, contents_of, strict=True):
            if layer.bounds is None:
                slab[slot, :, : held.num_rows] = rows
        if layer.bounds is not None:
            _pack(cache, layer_idx, slot, held, contents_of)
        if layer.window is not None:
            assert held.window is not None
            layer.window[slot, :, : held.window.shape[1]] = held.window
        cache.rows[layer_idx, slot] = held.rows
        cache.compacted_at[layer_idx, slot] = held.compacted_at
        cache.prompt_rows[layer_idx, slot] = held.prompt_rows


def _pack(
    cache: KVCache, layer_idx: int, slot: int, held: LayerContents, contents: Sequence[Tensor]
) -> None:
    """Have the heads of a ragged layer hold rows, side by side."""
    layer = cache.layers[layer_idx]
    assert layer.bounds is not None
    present = held.positions >= 0
    counts = present.sum(dim=1)
    bounds = packed_bounds(counts[None], layer.slab.capacity - held.rows)
    layer.bounds[slot] = bounds[0]
    numbers = torch.arange(held.rows - held.num_rows, held.rows, device=bounds.device)
    places, _ = places_of(bounds, layer.slab.capacity, numbers)
    for slab, rows in zip(layer.slabs, contents, strict=True):
        slab[slot].flatten(0, 1)[places[0][present]] = rows[present]
    if held.num_rows:
        cache.note_leads([layer_idx], [slot], counts.amax(dim=0, keepdim=True) - held.rows)


def _copy(
    cache: KVCache, layer_idx: int, slot: int, num: int | None, seq_len: int
) -> LayerContents:
    layer, place = cache.layers[layer_idx], (layer_idx, slot)
    num_rows = int(cache.rows[place] - (cache.seq_len[slot] - seq_len))
    in_columns = None
    if layer.bounds is not None and (num is None or layer.accumulators):
        in_columns = layer_rows(cache, layer_idx, [slot])

    def copied(name: str, slab: Tensor) -> Tensor:
        if num is not None and name not in layer.accumulators:
            return layer.newest(slab, slot, num_rows, num).clone()
        if in_columns is None:
            return slab[slot, :, :num_rows].clone()
        is_track = name in layer.tracks
        rows: Tensor = in_columns.track(name) if is_track else getattr(in_columns, name)
        return rows[0]

    window = None if layer.window is None else layer.window[slot, :, :seq_len].clone()
    return LayerContents(
        copied("keys", layer.keys),
        copied("values", layer.values),
        copied("positions", layer.positions),
        {name: copied(name, track) for name, track in layer.tracks.items()},
        window,
        int(cache.compacted_at[place]),
        min(int(cache.prompt_rows[place]), num_rows),
        num_rows,
    )
