"""One forward over the cache: where its new rows are stored, and what its queries may see.

New rows are provisional: `EagerStep.commit` makes them, and all that the forward has noted, facts;
`EagerStep.discard` ends a forward that has failed.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
from torch import Tensor

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.layouts.base import LayerCache, OpenRows
from kvpolicy.cache.layouts.tokens import NewTokens


class EagerStep:
    """The new tokens of one forward, and its layers.

    Attributes:
        cache: The KV cache.
        tokens: The new tokens.
        width: Token columns, ``L``.
        position_ids: Position of every column's token in its sequence, ``[B, L]``, 0 for pads.
        totals: Tokens of each slot once its prompt is in, ``[B]``.
        layers: Each layer that has stored its new rows.
        shared_rows: All rows to attend to, keys and values, of each of them to whose rows other
            layers attend, too.
        states: The states of each layer that has any, by its number: copies until `commit`.
        attended: Layers whose attention was computed.
        problems: Why attention by weights was not computed in kernels, on a GPU.
    """

    def __init__(
        self,
        cache: KVCache,
        slots: Sequence[int],
        lengths: Sequence[int],
        totals: Sequence[int] | None = None,
        ahead: np.ndarray | None = None,
    ) -> None:
        """Serve slots, with so many new tokens each (at least 1).

        ``totals`` is not needed if no more tokens of their prompts follow; for ``ahead`` see
        `NewTokens`.
        """
        self.cache = cache
        seen = self._seen(cache, np.asarray(slots))
        self.tokens = tokens = NewTokens(slots, lengths, seen, ahead)
        self.width, self.position_ids = tokens.width, tokens.position_ids
        self.totals = tokens.seq_len + tokens.lengths if totals is None else np.asarray(totals)
        self.layers: dict[int, OpenRows] = {}
        self.shared_rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: Mapping[int, Any] = self._open_states() if cache.states else {}
        self.attended: set[int] = set()
        self.problems: set[str] = set()

    def _seen(self, cache: KVCache, slots: np.ndarray) -> np.ndarray:
        """Tokens that the slots have seen before, ``[B]``."""
        seen: np.ndarray = cache.seq_len[slots]
        return seen

    def store(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new rows of one layer, ``[B, H_kv, L, D]``; return all rows to attend to."""
        layer = self.cache.layers[layer_idx]
        opened = self.layers[layer_idx] = self._open(layer)
        rows = opened.store(keys, values)
        if layer.shape.num_readers > 1:  # others would be held for longer than they are needed
            self.shared_rows[layer_idx] = rows
        return rows

    def _open(self, layer: LayerCache) -> OpenRows:
        return layer.open(self.tokens)

    def _open_states(self) -> Mapping[int, Any]:
        return {index: states.open(self.tokens) for index, states in self.cache.states.items()}

    @property
    def likeness(self) -> object:
        """What decides where the new rows go and which rows are attended to.

        A step of an equal one is this one over, with other tokens and positions, if this one
        `repeats`. It has taken the memory that it needs beside its slots by then.
        """
        tokens, cache = self.tokens, self.cache
        return (
            tuple(tokens.slots),
            tuple(tokens.lengths),
            cache.rows[:, tokens.slots].tobytes(),
            *(layout.reserve(tokens) for layout in cache.layouts),
        )

    @property
    def repeats(self) -> bool:
        """Whether a step of equal `likeness` does the same to the same tensors; once it has run."""
        shares_rows = any(layer.shape.num_readers > 1 for layer in self.cache.layers)
        plain = not self.cache.states and self.tokens.ahead is None and not shares_rows
        return plain and all(opened.repeats for opened in self.layers.values())

    def again(self) -> "EagerStep":
        """The same step before it stores anything, in the same tensors."""
        other = copy(self)
        other.layers, other.attended, other.problems = {}, set(), set()
        return other

    def take_over(self, done: "EagerStep") -> None:
        """Be what a step of equal `likeness` was, which has run over with the new tokens."""
        self.layers, self.attended, self.problems = done.layers, done.attended, done.problems

    def new_rows(
        self, layer_idx: int, states: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What belongs to tokens, without pads.

        Args:
            layer_idx: Decoder layer, counted from 0.
            states: A state of every column, ``[B, L, M]``.
            keys: ``[B, H_kv, L, D]``.
            values: Likewise.

        Returns:
            States ``[N, M]``, keys and values ``[N, H_kv, D]`` as attention reads them, positions
            ``[N]``.
        """
        layer, tokens = self.cache.layers[layer_idx], self.tokens
        keys = layer.store.keys.as_read(tokens.real(keys))
        values = layer.store.values.as_read(tokens.real(values))
        positions = tokens.on(layer.shape.device).positions
        return tokens.real(states[:, None])[:, 0], keys, values, positions

    def annotate(self, layer_idx: int, annotations: Mapping[str, Tensor]) -> None:
        """Note numbers of the new rows of a layer, ``[N, H_kv]``, for its tracks.

        Args:
            layer_idx: Decoder layer, counted from 0; it has stored its rows.
            annotations: The numbers by the name of a track.
        """
        for name, numbers in annotations.items():
            self.layers[layer_idx].annotate(name, numbers)

    def commit(self) -> None:
        """Make the new rows and all that was noted part of the cache, and count the tokens."""
        for opened in self.layers.values():
            opened.commit()
        for states in self.states.values():
            states.commit()
        self.cache.count(self.tokens.slots, self.tokens.lengths)
        self.shared_rows = {}

    def discard(self) -> None:
        """Leave no trace of a forward that has failed."""
        for opened in self.layers.values():
            opened.discard()
        self.layers, self.states, self.shared_rows = {}, {}, {}
