"""What a layer's keys and values look like, and what a plan wants stored of them."""

import math
import sys
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

# The room of a slot that may hold as many rows behind its prompt as its slab can.
UNLIMITED = sys.maxsize // 2

# Moves keys: layer index, keys [B, H_kv, K, D], positions to add [B, H_kv, K] -> moved keys.
Rotate = Callable[[int, Tensor, Tensor], Tensor]


@attrs.frozen
class StateShape:
    """A state of fixed size that a layer has of each sequence.

    Attributes:
        name: ``"conv.0"``: the newest inputs of the first convolution; ``"recurrent.0"``: what the
            first recurrence remembers.
        size: Its size, of one sequence.
        dtype: Its precision.
    """

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return math.prod(self.size) * self.dtype.itemsize


@attrs.frozen
class LayerShape:
    """What one layer holds of a sequence: keys and values, states of fixed size, both or nothing.

    A layer may attend to the rows of another one, its *source*. Then it holds no rows of its own,
    and its query heads count among those of the source: KV head h has the query heads of every
    reader that belong to it, those of the source first, then those of the others in their order.

    Attributes:
        num_heads: Query heads that attend to its rows, of all readers; 0: it holds no rows.
        num_kv_heads: Key/value heads; 0: it holds no rows.
        head_dim: Size of one head of queries and keys.
        dtype: Precision of keys and values.
        device: Device of keys and values.
        sliding_window: Tokens a query sees, its own included: the query at position p sees
            rows at positions above ``p - sliding_window``. ``None``: all rows before it.
        value_dim: Size of one head of values; by default that of keys.
        states: Its states of fixed size.
        num_readers: Layers that attend to its rows; 1: itself only.
        source: The layer whose rows it attends to; ``None``: itself, if it has attention.
        reader: Which of the readers of its source it is; 0: it attends to its own rows.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None = None
    states: tuple[StateShape, ...] = ()
    value_dim: int = attrs.field(
        default=attrs.Factory(lambda self: self.head_dim, takes_self=True), kw_only=True
    )
    num_readers: int = attrs.field(default=1, kw_only=True)
    source: int | None = attrs.field(default=None, kw_only=True)
    reader: int = attrs.field(default=0, kw_only=True)

    @property
    def has_rows(self) -> bool:
        """Whether it caches keys and values."""
        return self.num_kv_heads > 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return sum(state.num_bytes for state in self.states)

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of one token, in all heads, in the model's precision."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    def heads_of(self, reader: int, heads: Tensor) -> Tensor:
        """Of what belongs to query heads, ``[S, num_heads, ...]``, the part of one reader.

        Returns:
            A view ``[S, H_kv, G, ...]``, where ``G`` query heads of a reader belong to a KV head.
        """
        return heads.unflatten(1, (self.num_kv_heads, self.num_readers, -1))[:, :, reader]

    def zeros(self, *size: int) -> Tensor:
        """Zeros in this layer's dtype and on its device."""
        return torch.zeros(size, dtype=self.dtype, device=self.device)


@attrs.frozen
class Staging:
    """Rows beside the slabs of one layer, for prompts on their way in; all slots share them.

    Attributes:
        rows: Rows for each prompt, beyond those of its slab.
        num_prompts: Prompts that have some at a time.
    """

    rows: int
    num_prompts: int


@attrs.frozen
class Slab:
    """What one layer stores for every sequence.

    Attributes:
        capacity: Rows allocated for each slot.
        window_size: Most recent queries to store, 0 for none.
        tracks: Names of per-row fp32 numbers that travel with the rows. Those of accumulators are
            updated by attention.
        room: Rows that a slot may hold behind those of its prompt, which stay; ``None``: rows of
            prompts are evicted like others.
        ragged: Whether KV heads may hold different numbers of rows. Then ``capacity`` is the room
            of a head in the mean.
        staging: Rows beside the slabs; ``None``: there are none.
        key_bits: Bits of the numbers of keys; 0: as many as the model's precision has.
        value_bits: Those of values, likewise.
        exact: Newest tokens of which copies in the model's precision are kept of what has 4 bits.
    """

    capacity: int
    window_size: int = 0
    tracks: tuple[str, ...] = ()
    room: int | None = None
    ragged: bool = False
    staging: Staging | None = None
    key_bits: int = 0
    value_bits: int = 0
    exact: int = 0

    @property
    def most_rows(self) -> int:
        """Rows that a slot may hold."""
        return self.capacity + (0 if self.staging is None else self.staging.rows)

    @property
    def of_lanes(self) -> "Slab":
        """What is stored for a prompt beside its slab."""
        assert self.staging is not None
        return Slab(
            self.staging.rows,
            tracks=self.tracks,
            key_bits=self.key_bits,
            value_bits=self.value_bits,
        )
