"""Decode attention in torch's operations that reads nothing on the host, for any device.

What `kvpolicy.attention.triton_backend` does in one pass over the rows that are held takes several
passes over whole slabs here. It is what a GPU runs without the extra ``kernels``.
"""

import torch
from torch import Tensor

from kvpolicy.attention.torch_backend.decode import (
    Counts,
    DecodeSlabs,
    attend_to_rows,
    window_factor,
)


def attend_in_fixed_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slabs: DecodeSlabs,
    counts: Counts,
    *,
    scaling: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    sliding_window: int = 0,
) -> Tensor:
    """Store one new row in every slot, and attend to the rows that it holds.

    Arguments and result are those of `torch_backend.decode.attend_with_torch`.
    """
    if slabs.bounds is not None:
        return _attend_to_pools(
            query, key, value, slabs, counts, scaling=scaling, softcap=softcap, sinks=sinks
        )
    rows, seq_len, live = counts.rows, counts.seq_len, counts.live
    capacity = slabs.keys.shape[2]
    if sliding_window == capacity:
        full = (rows == capacity) & live[:, None]
        for slab in (slabs.keys, slabs.values, slabs.positions, *slabs.all_tracks):
            _drop_first(slab, full)
    newest = rows.clamp(max=capacity - 1)
    positions = seq_len[:, None].expand_as(rows)
    for slab, new in ((slabs.keys, key), (slabs.values, value), (slabs.positions, positions)):
        _put(slab, newest, new, live)
    _remember(slabs.window, query, seq_len, live, scaling)
    seen = torch.arange(capacity, device=rows.device) <= newest[..., None]
    if sliding_window:
        seen &= slabs.positions > (seq_len - sliding_window)[:, None, None]
    # A query that saw no row would get NaN.
    seen |= ~live[:, None, None]
    return attend_to_rows(
        query,
        slabs.keys,
        slabs.values,
        seen[:, :, None],
        slabs.accumulated_by_name,
        live,
        scaling,
        softcap,
        sinks,
    )


def _attend_to_pools(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slabs: DecodeSlabs,
    counts: Counts,
    *,
    scaling: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """The same where KV heads have segments: a slot is one head of ``H_kv * R`` rows.

    Rows of other heads are masked. That computes more than it needs, and copies nothing.
    """
    assert slabs.bounds is not None
    rows, seq_len, live = counts.rows, counts.seq_len, counts.live
    num_slots, num_heads, capacity = slabs.positions.shape
    newest = slabs.bounds[:, 1:] - capacity + rows.clamp(max=capacity - 1)
    positions = seq_len[:, None].expand_as(rows)
    for slab, new in ((slabs.keys, key), (slabs.values, value), (slabs.positions, positions)):
        pool = slab.view(num_slots, 1, -1, *slab.shape[3:])
        for head in range(num_heads):
            _put(pool, newest[:, head : head + 1], new[:, head : head + 1], live)
    _remember(slabs.window, query, seq_len, live, scaling)
    place = torch.arange(num_heads * capacity, device=rows.device)
    seen = (place >= slabs.bounds[:, :-1, None]) & (place <= newest[..., None])
    seen |= ~live[:, None, None]
    seen = seen.repeat_interleave(query.shape[1] // num_heads, dim=1)  # [W, H_q, H_kv * R]
    pools = (num_slots, 1, num_heads * capacity)
    return attend_to_rows(
        query,
        slabs.keys.view(*pools, -1),
        slabs.values.view(*pools, -1),
        seen[:, None],
        {name: track.view(pools) for name, track in slabs.accumulated_by_name.items()},
        live,
        scaling,
        softcap,
        sinks,
    )


def _remember(
    window: Tensor | None, query: Tensor, seq_len: Tensor, live: Tensor, scaling: float
) -> None:
    """Put the new queries into the window, if there is one."""
    if window is not None:
        index = (seq_len % window.shape[2])[:, None].expand(query.shape[:2])
        factor = window_factor(scaling, query.shape[2])
        _put(window, index, query if factor == 1 else query * factor, live)


def _drop_first(slab: Tensor, full: Tensor) -> None:
    """Drop the first row of slots and heads that are full, ``[W, H_kv]``; empty the last one."""
    rest = torch.cat([slab[:, :, 1:], torch.zeros_like(slab[:, :, :1])], dim=2)
    slab.copy_(torch.where(full.view(*full.shape, *[1] * (slab.dim() - 2)), rest, slab))


def _put(slab: Tensor, index: Tensor, new: Tensor, live: Tensor) -> None:
    """Write ``new``, ``[W, H, ...]``, to places ``[W, H]`` along the third axis of live slots."""
    at = index.view(*index.shape, 1, *[1] * (slab.dim() - 3)).expand(-1, -1, 1, *slab.shape[3:])
    taken = live.view(-1, *[1] * (slab.dim() - 1))
    slab.scatter_(2, at, torch.where(taken, new.unsqueeze(2).to(slab.dtype), slab.gather(2, at)))
