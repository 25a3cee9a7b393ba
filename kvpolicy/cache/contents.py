"""What one slot holds, as tensors of its own: the rows that are held, and no slab."""

from collections.abc import Iterator, Mapping
from itertools import chain

import attrs
import torch
from torch import Tensor

from kvpolicy.cache.shape import LayerShape


@attrs.frozen(eq=False)
class LayerContents:
    """What a slot holds in one layer: rows, states, both or nothing.

    Where heads hold different numbers of rows, ``T`` is that of the fullest head, and columns that
    a head has no row for come first, with position -1 and 0 elsewhere.

    Attributes:
        keys: Keys after RoPE, ``[H_kv, T, D]``, in the model's precision; as bytes where the plan
            stores integers, see `kvpolicy.attention.integers`.
        values: Values, likewise.
        positions: Position of each row's token, ``[H_kv, T]``, int64, strictly rising.
        tracks: Per-row numbers by name, ``[H_kv, T]``, fp32.
        window: The stored queries, ``[H_q, W, D]``, the query at position p at index ``p % W``;
            fewer if the sequence has seen fewer tokens. ``None`` if no policy reads queries.
        compacted_at: Tokens that the sequence had seen at the last compaction of this layer.
        prompt_rows: Rows at the beginning that stay, see `KVCache.prompt_rows`.
        rows: Rows of a head; in the mean, as `KVCache` counts them, if heads share them.
        states: States of fixed size by name, see `StateShape`.
        exact: Exact copies of the newest keys or values by name, ``[H_kv, E, D]``, as in the layer,
            see `kvpolicy.attention.exact`; fewer if the sequence has seen fewer tokens.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    tracks: Mapping[str, Tensor]
    window: Tensor | None
    compacted_at: int
    prompt_rows: int
    rows: int
    states: Mapping[str, Tensor] = attrs.field(factory=dict)
    exact: Mapping[str, Tensor] = attrs.field(factory=dict)

    @classmethod
    def without_rows(cls, shape: LayerShape) -> "LayerContents":
        """No row, as of a layer that has none."""
        none = shape.zeros(shape.num_kv_heads, 0, shape.head_dim)
        positions = none.new_zeros((shape.num_kv_heads, 0), dtype=torch.int64)
        return cls(none, none, positions, {}, None, compacted_at=0, prompt_rows=0, rows=0)

    @property
    def num_rows(self) -> int:
        """Rows of the fullest head, ``T``."""
        return self.positions.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        tensors = [self.keys, self.values, self.positions, *self.tracks.values()]
        tensors += [*self.states.values(), *self.exact.values()]
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
            states={name: state.to(device) for name, state in self.states.items()},
            exact={name: rows.to(device) for name, rows in self.exact.items()},
        )


@attrs.frozen(eq=False)
class SlotContents:
    """What a slot holds in all layers.

    Attributes:
        layers: The layers, in order.
        seq_len: Tokens that the sequence has seen.
        prompt_len: Tokens whose rows stay in layers that keep prompts.
        rope_offset: See `KVCache`.
    """

    layers: tuple[LayerContents, ...]
    seq_len: int
    prompt_len: int
    rope_offset: int = 0

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The tensors of all layers."""
        return chain.from_iterable(layer.tensors for layer in self.layers)
