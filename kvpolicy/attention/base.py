"""The interface of a backend, and what it is given of a layer in a decode step.

A decode step stores one new row in every slot and attends from it to the rows that the slot holds.
Its tensors have fixed shapes and fixed addresses; how many rows a slot holds is one of them, and is
read where the rows are attended to. For eager forwards, of many tokens, see
`kvpolicy.attention.eager`.

Shapes: ``W`` slots, ``H_q`` query heads, ``H_kv`` KV heads, ``R`` rows of a slab, head size ``D``.
"""

from collections.abc import Callable
from typing import Protocol

import attrs
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.integers import quantize


@attrs.frozen(eq=False)
class DecodeLayer:
    """One layer in decode steps: what a step reads and changes.

    Attributes:
        keys: ``[W, H_kv, R, D]``; bytes, ``[W, H_kv, R, ...]``, where ``key_bits`` is not 0.
        values: Likewise; heads of values may have another size than those of keys, ``V``.
        positions: ``[W, H_kv, R]``, int64, -1 where empty.
        rows: Rows held before the step, ``[W, H_kv]``, int64; if KV heads have segments, those of a
            head in the mean.
        seq_len: Tokens seen: the position of the new row, ``[W]``, int64.
        live: Slots that take part, bool ``[W]``. Nothing is stored for the others, and their
            output is finite and of no meaning.
        tracks: Numbers of the rows, ``[W, H_kv, R]`` each, which move with them.
        accumulated: More such tracks, fp32, which the weights of each row update.
        accumulators: Their names, see `kvpolicy.attention.accumulators`.
        window: The last queries, ``[W, H_q, N, D]``, that at position p at index ``p % N``;
            ``None``: they are not wanted.
        bounds: Where KV heads hold different numbers of rows, the bounds of their segments in the
            pool of ``H_kv * R`` rows of a slot, ``[W, H_kv + 1]``, int64: head h has the places
            from ``bounds[h]`` to ``bounds[h + 1]``, and as many free rows behind its rows as any
            other head, ``R`` less its ``rows``. ``None``: every head has ``R`` places.
        sliding_window: Tokens that a query sees, its own included; 0: all. A slab that holds as
            many rows drops the oldest of a slot that is full.
        key_bits: Bits of the numbers of keys that are stored in integers, 8 or 4, see
            `kvpolicy.attention.integers`; 0: keys are numbers as they are.
        value_bits: Those of values.
        exact_keys: Exact copies of the newest keys where these are integers, ``[W, H_kv, E, D]``,
            see `kvpolicy.attention.exact`; ``None``: there are none.
        exact_values: Those of values.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    rows: Tensor
    seq_len: Tensor
    live: Tensor
    tracks: list[Tensor] = attrs.field(factory=list)
    accumulated: list[Tensor] = attrs.field(factory=list)
    accumulators: list[str] = attrs.field(
        factory=list, validator=attrs.validators.deep_iterable(attrs.validators.in_(ACCUMULATORS))
    )
    window: Tensor | None = None
    bounds: Tensor | None = None
    sliding_window: int = 0
    key_bits: int = 0
    value_bits: int = 0
    exact_keys: Tensor | None = None
    exact_values: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether keys and values are numbers as they are."""
        return not (self.key_bits or self.value_bits)

    def stored(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What is stored of keys and values ``[..., D]``."""
        return (
            quantize(key, self.key_bits) if self.key_bits else key,
            quantize(value, self.value_bits) if self.value_bits else value,
        )

    @property
    def slides(self) -> bool:
        """Whether a slab holds a whole sliding window, so that a full one drops its oldest row."""
        return self.sliding_window == self.keys.shape[2]

    @property
    def all_tracks(self) -> list[Tensor]:
        """The tracks, with those that accumulate."""
        return [*self.tracks, *self.accumulated]

    @property
    def accumulated_by_name(self) -> dict[str, Tensor]:
        """The tracks that accumulate, ``[W, H_kv, R]`` each."""
        return dict(zip(self.accumulators, self.accumulated, strict=True))

    @property
    def places(self) -> Tensor:
        """Place of each new row, ``[W, H_kv]``: in its slab or, with segments, in its pool."""
        capacity = self.keys.shape[2]
        newest = self.rows.clamp(max=capacity - 1)
        return newest if self.bounds is None else self.bounds[:, 1:] - capacity + newest


def window_factor(scaling: float, head_dim: int) -> float:
    """What queries are multiplied by in a window, so that policies need not know the scaling."""
    factor = scaling * head_dim**0.5
    return 1.0 if abs(factor - 1) < 1e-6 else factor


class Decode(Protocol):
    """The attention of one layer in decode steps."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store one new row in every slot, attend to the rows that it holds, and accumulate.

        Args:
            query: Queries after RoPE, ``[W, H_q, D]``; query head h belongs to KV head ``h // G``.
            key: Keys of the new rows after RoPE, ``[W, H_kv, D]``.
            value: Their values, ``[W, H_kv, V]``.
            scaling: Factor on the logits.
            softcap: Logits become ``softcap * tanh(logits / softcap)``; 0: no cap.
            sinks: A learned logit of each query head, ``[H_q]``, that takes a share of the weights.

        Returns:
            ``[W, H_q, V]``.
        """


# Makes chosen rows the first of their slots and empties the rows behind them, within the slab; see
# `kvpolicy.attention.triton_backend.compact`.
Compact = Callable[..., None]


class AttentionBackend(Protocol):
    """What stores, attends, accumulates and moves rows in decode steps on one kind of device.

    Attributes:
        compact: Moves rows within their slab; ``None``: they move by way of a copy.
    """

    compact: Compact | None

    def bind(self, layer: DecodeLayer) -> Decode:
        """The attention of a layer whose tensors stay where they are."""
