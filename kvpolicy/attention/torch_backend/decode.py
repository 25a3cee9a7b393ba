"""Decode attention over slabs: store one new row in every slot, and attend to the rows it holds.

Tensors have fixed shapes and fixed addresses. How many rows a slot holds is one of them and is read
where the rows are attended to. On a CPU reading is free, and only rows that are held are attended
to; a caller that knows the rows of several layers already passes them as `HeldRows`.
`kvpolicy.attention.operator` has the operator of torch that does the same on any device.

Shapes: ``W`` slots, ``H_q`` query heads, ``H_kv`` KV heads, ``R`` rows of a slab, head size ``D``.
"""

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.attention.accumulators import ACCUMULATORS, accumulate


@attrs.frozen(eq=False)
class HeldRows:
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


def held_rows(rows: Tensor, live: Tensor, capacity: int, bounds: Tensor | None = None) -> HeldRows:
    """Read how many rows the slots of a layer hold.

    Args:
        rows: Rows before the step, ``[W, H_kv]``, int64.
        live: Slots that take part, bool ``[W]``; the others may be full.
        capacity: Rows of a slab, ``R``.
        bounds: See `DecodeSlabs`.
    """
    newest = rows.clamp(max=capacity - 1)
    places, firsts = None, torch.arange(rows.numel()) * capacity
    if bounds is not None:
        firsts = (torch.arange(len(rows))[:, None] * rows.shape[1] * capacity) + bounds[:, :-1]
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
    if bounds is not None:
        within = torch.minimum(torch.arange(most), newest[:, :, None])
        places = within + firsts.view(*rows.shape, 1)
    return HeldRows(index, chosen, most, mask, places)


@attrs.frozen(eq=False)
class DecodeSlabs:
    """What a decode step reads and changes in one layer.

    Attributes:
        keys: ``[W, H_kv, R, D]``.
        values: ``[W, H_kv, R, D]``.
        positions: ``[W, H_kv, R]``, int64, -1 where empty.
        tracks: Numbers of the rows, ``[W, H_kv, R]`` each, which move with them.
        accumulated: More such tracks, fp32, which the weights of each row update.
        accumulators: Their names, see `kvpolicy.attention.accumulators`.
        window: The last queries, ``[W, H_q, N, D]``, that at position p at index ``p % N``;
            ``None``: they are not wanted.
        bounds: Where KV heads hold different numbers of rows, the bounds of their segments in the
            pool of ``H_kv * R`` rows of a slot, ``[W, H_kv + 1]``, int64: head h has the places
            from ``bounds[h]`` to ``bounds[h + 1]``, and as many free rows behind its rows as any
            other head, ``R`` less its `Counts.rows`. ``None``: every head has ``R`` places.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    tracks: list[Tensor] = attrs.field(factory=list)
    accumulated: list[Tensor] = attrs.field(factory=list)
    accumulators: list[str] = attrs.field(
        factory=list, validator=attrs.validators.deep_iterable(attrs.validators.in_(ACCUMULATORS))
    )
    window: Tensor | None = None
    bounds: Tensor | None = None

    @property
    def all_tracks(self) -> list[Tensor]:
        """The tracks, with those that accumulate."""
        return [*self.tracks, *self.accumulated]

    @property
    def accumulated_by_name(self) -> dict[str, Tensor]:
        """The tracks that accumulate, ``[W, H_kv, R]`` each."""
        return dict(zip(self.accumulators, self.accumulated, strict=True))


@attrs.frozen(eq=False)
class Counts:
    """State of the slots before a step.

    Attributes:
        rows: Rows held in one layer, ``[W, H_kv]``, int64; if KV heads have segments, those of a
            head in the mean.
        seq_len: Tokens seen: the position of the new row, ``[W]``, int64.
        live: Slots that take part, bool ``[W]``. Nothing is stored for the others, and their
            output is finite and of no meaning.
    """

    rows: Tensor
    seq_len: Tensor
    live: Tensor


def attend_with_torch(
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
    held: HeldRows | None = None,
) -> Tensor:
    """Store one new row in every slot, and attend to the rows that it holds.

    Args:
        query: Queries after RoPE, ``[W, H_q, D]``; query head h belongs to KV head ``h // G``.
        key: Keys of the new rows after RoPE, ``[W, H_kv, D]``.
        value: Their values, ``[W, H_kv, D]``.
        slabs: The layer; changed in place.
        counts: State of the slots.
        scaling: Factor on the logits.
        softcap: Logits become ``softcap * tanh(logits / softcap)``; 0: no cap.
        sinks: A learned logit of each query head, ``[H_q]``, that takes a share of the weights.
        sliding_window: Tokens that a query sees, its own included; 0: all. A slab that holds as
            many rows drops the oldest of a slot that is full.
        held: The rows of this layer, if they are known; only without a sliding window.

    Returns:
        ``[W, H_q, D]``.
    """
    rows, seq_len, live = counts.rows, counts.seq_len, counts.live
    capacity = slabs.keys.shape[2]
    if sliding_window == capacity:
        rows = drop_oldest(slabs, rows, live)
    held = held_rows(rows, live, capacity, slabs.bounds) if held is None else held
    positions = seq_len[:, None].expand_as(rows)
    for slab, new in ((slabs.keys, key), (slabs.values, value), (slabs.positions, positions)):
        flat = new.flatten(0, 1)
        flat = flat if held.chosen is None else flat[held.chosen]
        slab.view(-1, *slab.shape[3:]).index_copy_(0, held.index, flat)
    if slabs.window is not None:
        _remember(slabs.window, query, seq_len, live, scaling)
    if held.places is not None:
        return _attend_to_places(
            query, slabs, held, live, scaling=scaling, softcap=softcap, sinks=sinks
        )
    mask = held.mask
    if sliding_window:
        mask = _in_window(slabs.positions[:, :, : held.most], seq_len - sliding_window, live, mask)
    most = held.most
    return attend_to_rows(
        query,
        slabs.keys[:, :, :most],
        slabs.values[:, :, :most],
        mask,
        {name: track[:, :, :most] for name, track in slabs.accumulated_by_name.items()},
        None if held.chosen is None else live,
        scaling,
        softcap,
        sinks,
    )


def _attend_to_places(
    query: Tensor,
    slabs: DecodeSlabs,
    held: HeldRows,
    live: Tensor,
    *,
    scaling: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend to rows that are copied out of the segments of their heads, ``[W, H_q, D]``."""
    places = held.places
    assert places is not None

    def copied(slab: Tensor) -> Tensor:
        rows = slab.flatten(0, 2).index_select(0, places.flatten())
        return rows.reshape(*places.shape, *slab.shape[3:])

    accumulated = {name: copied(track) for name, track in slabs.accumulated_by_name.items()}
    output = attend_to_rows(
        query,
        copied(slabs.keys),
        copied(slabs.values),
        held.mask,
        accumulated,
        None if held.chosen is None else live,
        scaling,
        softcap,
        sinks,
    )
    # Columns that a head has no row for name its newest row.
    own = slice(None) if held.mask is None else held.mask[:, :, 0].expand_as(places)
    for name, track in slabs.accumulated_by_name.items():
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
    softcap: float,
    sinks: Tensor | None,
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
        softcap: See `attend_with_torch`.
        sinks: See `attend_with_torch`.

    Returns:
        ``[W, H_q, D]``.
    """
    grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[2])  # [W, H_kv, G, D]
    if not accumulated and not softcap and sinks is None:
        # The heads of a group take the place of the length: a key is read once for all of them.
        output = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=scaling
        )
        return output.reshape(query.shape)
    weights, logits = _weights(grouped, keys, mask, scaling, softcap, sinks)
    if accumulated:
        accumulate(accumulated, weights, logits, live)
    return (weights.to(values.dtype) @ values).reshape(query.shape)


def _weights(
    grouped: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Softmax weights, and the logits that the softmax read, ``[W, H_kv, G, T]``, fp32."""
    if keys.dtype == torch.float16:
        # A product of large keys and queries may exceed what half precision can hold.
        grouped, keys = grouped.float(), keys.float()
    logits = (grouped @ keys.transpose(2, 3)).float() * scaling
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return logits.softmax(dim=-1), logits
    sinks = sinks.float().reshape(logits.shape[1], -1, 1)
    total = torch.logaddexp(logits.logsumexp(dim=-1, keepdim=True), sinks)
    return (logits - total).exp(), logits


def window_factor(scaling: float, head_dim: int) -> float:
    """What queries are multiplied by in a window, so that policies need not know the scaling."""
    factor = scaling * head_dim**0.5
    return 1.0 if abs(factor - 1) < 1e-6 else factor


def _remember(window: Tensor, query: Tensor, seq_len: Tensor, live: Tensor, scaling: float) -> None:
    """Put the new queries into the window, with any scaling other than ``D ** -0.5``."""
    factor = window_factor(scaling, query.shape[-1])
    query = query if factor == 1 else query * factor
    slots = live.nonzero()[:, 0]
    window[slots, :, seq_len[slots] % window.shape[2]] = query[slots]


def _in_window(
    positions: Tensor, oldest: Tensor, live: Tensor, mask: Tensor | None
) -> Tensor | None:
    """Leave rows at positions up to ``oldest``, ``[W]``, out of a mask; positions rise."""
    if bool((positions[:, :, 0] > oldest[:, None]).all()):
        return mask
    seen = (positions > oldest[:, None, None])[:, :, None]
    seen |= ~live[:, None, None, None]  # a query that saw no row would get NaN
    return seen if mask is None else mask & seen


def drop_oldest(slabs: DecodeSlabs, rows: Tensor, live: Tensor) -> Tensor:
    """Drop the first row of slots and heads that are full; returns the rows that are left."""
    full = (rows == slabs.keys.shape[2]) & live[:, None]
    if not bool(full.any()):
        return rows
    tracks = slabs.all_tracks
    for slab in (slabs.keys, slabs.values, slabs.positions, *tracks):
        slab[full, :-1] = slab[full, 1:]
    for track in tracks:  # the new row takes the last place; keys and values replace it
        track[full, -1] = 0
    return rows - full.long()
