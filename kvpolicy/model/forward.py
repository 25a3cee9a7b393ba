"""One call of a model: what it is given for its cache, and what is wanted from it."""

from typing import Any

import attrs
from torch import Tensor
from transformers import Cache

from kvpolicy.cache.layout import StepLayout
from kvpolicy.errors import ModelError


class SlabCache(Cache):
    """What a model takes for its cache: stores into the slabs through the step under way."""

    def __init__(self, step: StepLayout) -> None:
        super().__init__(layers=[])
        self._step = step
        self.stored: set[int] = set()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new rows of a layer; return all rows to attend to, ``[B, H_kv, T, D]``."""
        self.stored.add(layer_idx)
        shape = self._step.cache.layers[layer_idx].shape
        expected = (shape.num_kv_heads, shape.head_dim)
        for states in (key_states, value_states):
            if states.shape[1::2] != expected:
                heads, width = states.shape[1::2]
                msg = (
                    f"the model cannot be run: it stores {heads} heads of size {width} in layer "
                    f"{layer_idx}; its configuration says {expected[0]} of size {expected[1]}"
                )
                raise ModelError(msg)
        return self._step.store(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen before this forward."""
        return int(self._step.seq_len.max())


@attrs.frozen
class Forward:
    """One call of the model.

    Attributes:
        arguments: What to call it with.
    """

    arguments: dict[str, Any]
    _states: list[Tensor]

    @property
    def last_states(self) -> Tensor | None:
        """Hidden states after the final norm, ``[B, L, M]``, if they are wanted."""
        return self._states[0] if self._states else None
