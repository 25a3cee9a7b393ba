"""Decode attention that reads on the host how many rows are held, and attends to these only."""

from collections.abc import Mapping
from functools import lru_cache

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.attention.accumulators import accumulate, read_logits
from kvpolicy.attention.base import DecodeLayer, window_factor
from kvpolicy.attention.blocks import blocks
from kvpolicy.attention.exact import with_exact
from kvpolicy.attention.integers import dequantize
from kvpolicy.attention.softmax import Softmax


def store_and_attend(
    layer: DecodeLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store one new row in every slot, and attend to the rows that it holds, see `Decode`."""
    rows = drop_oldest(layer) if layer.slides else layer.rows
    held = _held_in(layer, rows)
    positions = layer.seq_len[:, None].expand_as(rows)
    new_key, new_value = layer.stored(key, value)
    for slab, new in (
        (layer.keys, new_key),
        (layer.values, new_value),
        (layer.positions, positions),
    ):
        flat = new.flatten(0, 1)
        flat = flat if held.chosen is None else flat[held.chosen]
        slab.view(-1, *slab.shape[3:]).index_copy_(0, held.index, flat)
    _remember(layer, query, scaling)
    _copy_exactly(layer, key, value)
    softmax = Softmax(softcap or None, sinks)
    attend = Attend(layer, key.dtype, value.shape[2])
    if held.places is not None:
        return _attend_to_places(layer, held, query, scaling, softmax, attend)
    mask, most = held.mask, held.most
    if layer.sliding_window:
        mask = _in_window(layer, most, mask)
    return attend(
        query,
        layer.keys[:, :, :most],
        layer.values[:, :, :most],
        layer.positions[:, :, :most],
        mask,
        {name: track[:, :, :most] for name, track in layer.accumulated_by_name.items()},
        None if held.chosen is None else layer.live,
        scaling,
        softmax,
    )


@attrs.frozen(eq=False)
class _HeldRows:
    """Which rows of a layer hold tokens in a decode step, as read on the host.

    Attributes:
        index: Place of each new row in a flattened slab ``[W * H_kv * R]``, ``[N]`` for ``N``
            slots and heads that take part.
        chosen: Those slots and heads, of ``[W * H_kv]``; ``None``: all.
        most: Rows of the fullest slot, the new one included.
        mask: Rows to attend to, bool ``[W, 1 or H_kv, 1, most]``; ``None``: all.
        places: Place of each row in a flattened slab, ``[W, H_kv, most]``, if KV heads have
            segments; ``None``: the first rows of each.
    """

    index: Tensor
    chosen: Tensor | None
    most: int
    mask: Tensor | None
    places: Tensor | None = None


def _held_in(layer: DecodeLayer, rows: Tensor) -> _HeldRows:
    """Which rows a layer holds that held so many, ``[W, H_kv]``, before the step."""
    bounds = None if layer.bounds is None else layer.bounds.numpy().tobytes()
    of_slots = rows.numpy().tobytes(), layer.live.numpy().tobytes()
    return _held_rows(*of_slots, rows.shape[1], layer.keys.shape[2], bounds)


# Most layers of a step hold equally many rows. An entry may be as large as the rows of one head.
@lru_cache(maxsize=4)
def _held_rows(
    of_slots: bytes, taking_part: bytes, num_heads: int, capacity: int, of_bounds: bytes | None
) -> _HeldRows:
    """Which rows are held, from the bytes of `DecodeLayer.rows`, ``live`` and ``bounds``."""
    rows = torch.from_numpy(np.frombuffer(of_slots, dtype=np.int64).copy()).view(-1, num_heads)
    live = torch.from_numpy(np.frombuffer(taking_part, dtype=np.bool_).copy())
    newest = rows.clamp(max=capacity - 1)
    places, firsts = None, torch.arange(rows.numel()) * capacity
    if of_bounds is not None:
        bounds = torch.from_numpy(np.frombuffer(of_bounds, dtype=np.int64).copy())
        bounds = bounds.view(len(rows), -1)
        firsts = (torch.arange(len(rows))[:, None] * num_heads * capacity) + bounds[:, :-1]
        firsts = firsts.flatten()
        newest = newest + bounds.diff(dim=1) - capacity
    index = newest.flatten() + firsts
    chosen = None
    if not bool(live.all()):
        chosen = live[:, None].expand_as(rows).flatten().nonzero()[:, 0]
        index = index[chosen]
    counts = newest + 1
    if bool((counts == counts[:, :1]).all()):  # the heads of a slot share a mask
        counts = counts[:, :1]
    fewest, most = (int(count) for count in counts.aminmax())
    mask = None if fewest == most else (torch.arange(most) < counts[:, :, None])[:, :, None]
    if of_bounds is not None:
        within = torch.minimum(torch.arange(most), newest[:, :, None])
        places = within + firsts.view(*rows.shape, 1)
    return _HeldRows(index, chosen, most, mask, places)


def _attend_to_places(
    layer: DecodeLayer,
    held: _HeldRows,
    query: Tensor,
    scaling: float,
    softmax: Softmax,
    attend: "Attend",
) -> Tensor:
    """Attend to rows that are copied out of the segments of their heads, ``[W, H_q, D]``."""
    places = held.places
    assert places is not None

    def copied(slab: Tensor) -> Tensor:
        rows = slab.flatten(0, 2).index_select(0, places.flatten())
        return rows.reshape(*places.shape, *slab.shape[3:])

    accumulated = {name: copied(track) for name, track in layer.accumulated_by_name.items()}
    positions = copied(layer.positions)
    if held.mask is not None:
        positions = positions.masked_fill_(~held.mask[:, :, 0], -1)
    output = attend(
        query,
        copied(layer.keys),
        copied(layer.values),
        positions,
        held.mask,
        accumulated,
        None if held.chosen is None else layer.live,
        scaling,
        softmax,
    )
    # Columns that a head has no row for name its newest row.
    own = slice(None) if held.mask is None else held.mask[:, :, 0].expand_as(places)
    for name, track in layer.accumulated_by_name.items():
        track.view(-1)[places[own]] = accumulated[name][own]
    return output


def attend_to_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    accumulated: Mapping[str, Tensor],
    live: Tensor | None,
    scaling: float,
    softmax: Softmax,
) -> Tensor:
    """Attend from one query per slot to the first ``T`` rows.

    Args:
        query: ``[W, H_q, D]``.
        keys: ``[W, H_kv, T, D]``.
        values: ``[W, H_kv, T, D]``.
        mask: Rows to attend to, bool ``[W, 1 or H_kv, 1, T]``; ``None``: all.
        accumulated: Accumulators by name, ``[W, H_kv, T]`` each; changed in place.
        live: Slots whose rows receive anything, bool ``[W]``; ``None``: all.
        scaling: Factor on the logits.
        softmax: The layer's softmax.

    Returns:
        ``[W, H_q, D]``.
    """
    grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[2])  # [W, H_kv, G, D]
    if softmax.is_plain and not accumulated:
        # The heads of a group take the place of the length: a key is read once for all of them.
        output = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=scaling
        )
        return output.reshape(*query.shape[:2], -1)
    if keys.dtype == torch.float16:
        # A product of large keys and queries may exceed what half precision can hold.
        grouped, keys = grouped.float(), keys.float()
    logits = (grouped @ keys.transpose(2, 3)).float() * scaling
    logits = logits[:, :, :, None]  # the length of a query is 1
    logits = softmax.masked(logits, None if mask is None else mask[:, :, :, None])
    weights = softmax.weights_of(logits, overwrite=not read_logits(accumulated))[:, :, :, 0]
    if accumulated:
        accumulate(accumulated, weights, logits[:, :, :, 0], live)
    return (weights.to(values.dtype) @ values).reshape(*query.shape[:2], -1)


@attrs.frozen(eq=False)
class Attend:
    """Attends to rows of a layer: to integers some slots at a time, which are made numbers.

    Attributes:
        layer: The layer.
        dtype: The model's precision.
        value_dim: Size of a head of values.
    """

    layer: DecodeLayer
    dtype: torch.dtype
    value_dim: int

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        accumulated: Mapping[str, Tensor],
        live: Tensor | None,
        scaling: float,
        softmax: Softmax,
    ) -> Tensor:
        """Attend as `attend_to_rows` does, to rows ``[W, H_kv, T, ...]`` at some positions.

        Where all heads share a pool, these are ``[W, 1, T, ...]``, and positions ``[W, H_kv, T]``,
        -1 in rows of other heads.
        """
        layer, dim = self.layer, query.shape[2]
        if layer.is_plain:
            return attend_to_rows(query, keys, values, mask, accumulated, live, scaling, softmax)
        output = query.new_empty(*query.shape[:2], self.value_dim, dtype=self.dtype)
        per_query = keys.shape[1:3].numel() * (dim + self.value_dim)
        for now in blocks(len(query), per_query, query.device):
            at = positions[now], layer.seq_len[now]
            output[now] = attend_to_rows(
                query[now],
                self._numbers(keys[now], dim, layer.key_bits, layer.exact_keys, now, *at),
                self._numbers(
                    values[now], self.value_dim, layer.value_bits, layer.exact_values, now, *at
                ),
                None if mask is None else mask[now],
                {name: track[now] for name, track in accumulated.items()},
                None if live is None else live[now],
                scaling,
                softmax,
            )
        return output

    def _numbers(
        self,
        stored: Tensor,
        dim: int,
        bits: int,
        ring: Tensor | None,
        now: slice,
        positions: Tensor,
        newest: Tensor,
    ) -> Tensor:
        """Keys or values of some slots as numbers."""
        if not bits:
            return stored
        rows = dequantize(stored, dim, bits, self.dtype)
        if ring is None:
            return rows
        # One by one where all heads share a pool: each has copies of its own.
        num = 1 if rows.shape[1] < ring.shape[1] else ring.shape[1]
        pairs = zip(positions.split(num, dim=1), ring[now].split(num, dim=1), strict=True)
        for at, copies in pairs:
            rows = with_exact(rows, at, copies, newest)
        return rows


def _remember(layer: DecodeLayer, query: Tensor, scaling: float) -> None:
    """Put the new queries into the window, with any scaling other than ``D ** -0.5``."""
    window = layer.window
    if window is None:
        return
    factor = window_factor(scaling, query.shape[-1])
    query = query if factor == 1 else query * factor
    slots = layer.live.nonzero()[:, 0]
    window[slots, :, layer.seq_len[slots] % window.shape[2]] = query[slots]


def _copy_exactly(layer: DecodeLayer, key: Tensor, value: Tensor) -> None:
    """Copy the new rows into the rings of the slots that take part."""
    for ring, new in ((layer.exact_keys, key), (layer.exact_values, value)):
        if ring is not None:
            slots = layer.live.nonzero()[:, 0]
            ring[slots, :, layer.seq_len[slots] % ring.shape[2]] = new[slots].to(ring.dtype)


def _in_window(layer: DecodeLayer, num_rows: int, mask: Tensor | None) -> Tensor | None:
    """Leave rows that the new token does not see out of a mask; positions rise."""
    positions = layer.positions[:, :, :num_rows]
    oldest = layer.seq_len - layer.sliding_window
    if bool((positions[:, :, 0] > oldest[:, None]).all()):
        return mask
    seen = (positions > oldest[:, None, None])[:, :, None]
    seen |= ~layer.live[:, None, None, None]  # a query that saw no row would get NaN
    return seen if mask is None else mask & seen


def drop_oldest(layer: DecodeLayer) -> Tensor:
    """Drop the first row of slots and heads that are full; returns the rows that are left."""
    full = (layer.rows == layer.keys.shape[2]) & layer.live[:, None]
    if not bool(full.any()):
        return layer.rows
    tracks = layer.all_tracks
    for slab in (layer.keys, layer.values, layer.positions, *tracks):
        slab[full, :-1] = slab[full, 1:]
    for track in tracks:  # the new row takes the last place; keys and values replace it
        track[full, -1] = 0
    return layer.rows - full.long()
