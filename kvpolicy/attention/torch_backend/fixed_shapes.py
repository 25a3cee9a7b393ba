"""Decode attention that reads nothing on the host, for any device.

What `kvpolicy.attention.triton_backend` does in one pass over the rows that are held takes several
passes over whole slabs here. It is what a GPU runs without the extra ``kernels``.
"""

import torch
from torch import Tensor

from kvpolicy.attention.base import DecodeLayer, window_factor
from kvpolicy.attention.softmax import Softmax
from kvpolicy.attention.torch_backend.decode import Attend


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
    softmax = Softmax(softcap or None, sinks)
    if layer.bounds is not None:
        return _attend_to_pools(layer, layer.bounds, query, key, value, scaling, softmax)
    rows, seq_len, live = layer.rows, layer.seq_len, layer.live
    capacity = layer.keys.shape[2]
    if layer.slides:
        full = (rows == capacity) & live[:, None]
        for slab in (layer.keys, layer.values, layer.positions, *layer.all_tracks):
            _drop_first(slab, full)
    newest = layer.places
    positions = seq_len[:, None].expand_as(rows)
    new_key, new_value = layer.stored(key, value)
    for slab, new in (
        (layer.keys, new_key),
        (layer.values, new_value),
        (layer.positions, positions),
    ):
        _put(slab, newest, new, live)
    _remember(layer, query, scaling)
    _copy_exactly(layer, key, value)
    seen = torch.arange(capacity, device=rows.device) <= newest[..., None]
    if layer.sliding_window:
        seen &= layer.positions > (seq_len - layer.sliding_window)[:, None, None]
    # A query that saw no row would get NaN.
    seen |= ~live[:, None, None]
    return Attend(layer, key.dtype, value.shape[2])(
        query,
        layer.keys,
        layer.values,
        layer.positions,
        seen[:, :, None],
        layer.accumulated_by_name,
        live,
        scaling,
        softmax,
    )


def _attend_to_pools(
    layer: DecodeLayer,
    bounds: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    softmax: Softmax,
) -> Tensor:
    """The same where KV heads have segments: a slot is one head of ``H_kv * R`` rows.

    Rows of other heads are masked. That computes more than it needs, and copies nothing.
    """
    live = layer.live
    num_slots, num_heads, capacity = layer.positions.shape
    newest = layer.places
    positions = layer.seq_len[:, None].expand_as(newest)
    new_key, new_value = layer.stored(key, value)
    for slab, new in (
        (layer.keys, new_key),
        (layer.values, new_value),
        (layer.positions, positions),
    ):
        pool = slab.view(num_slots, 1, -1, *slab.shape[3:])
        for head in range(num_heads):
            _put(pool, newest[:, head : head + 1], new[:, head : head + 1], live)
    _remember(layer, query, scaling)
    _copy_exactly(layer, key, value)
    place = torch.arange(num_heads * capacity, device=newest.device)
    of_head = (place >= bounds[:, :-1, None]) & (place <= newest[..., None])  # [W, H_kv, H_kv * R]
    seen = of_head | ~live[:, None, None]
    seen = seen.repeat_interleave(query.shape[1] // num_heads, dim=1)  # [W, H_q, H_kv * R]
    pools = (num_slots, 1, num_heads * capacity)
    return Attend(layer, key.dtype, value.shape[2])(
        query,
        layer.keys.view(*pools, -1),
        layer.values.view(*pools, -1),
        layer.positions.view(pools).masked_fill(~of_head, -1),
        seen[:, None],
        {name: track.view(pools) for name, track in layer.accumulated_by_name.items()},
        live,
        scaling,
        softmax,
    )


def _copy_exactly(layer: DecodeLayer, key: Tensor, value: Tensor) -> None:
    """Copy the new rows into the rings, if there are any."""
    for ring, new in ((layer.exact_keys, key), (layer.exact_values, value)):
        if ring is not None:
            index = layer.seq_len % ring.shape[2]
            _put(ring, index[:, None].expand(new.shape[:2]), new, layer.live)


def _remember(layer: DecodeLayer, query: Tensor, scaling: float) -> None:
    """Put the new queries into the window, if there is one."""
    if layer.window is not None:
        index = layer.seq_len % layer.window.shape[2]
        factor = window_factor(scaling, query.shape[2])
        new = query if factor == 1 else query * factor
        _put(layer.window, index[:, None].expand(query.shape[:2]), new, layer.live)


def _drop_first(slab: Tensor, full: Tensor) -> None:
    """Drop the first row of slots and heads that are full, ``[W, H_kv]``; empty the last one."""
    rest = torch.cat([slab[:, :, 1:], torch.zeros_like(slab[:, :, :1])], dim=2)
    slab.copy_(torch.where(full.view(*full.shape, *[1] * (slab.dim() - 2)), rest, slab))


def _put(slab: Tensor, index: Tensor, new: Tensor, live: Tensor) -> None:
    """Write ``new``, ``[W, H, ...]``, to places ``[W, H]`` along the third axis of live slots."""
    at = index.view(*index.shape, 1, *[1] * (slab.dim() - 3)).expand(-1, -1, 1, *slab.shape[3:])
    taken = live.view(-1, *[1] * (slab.dim() - 1))
    slab.scatter_(2, at, torch.where(taken, new.unsqueeze(2).to(slab.dtype), slab.gather(2, at)))
