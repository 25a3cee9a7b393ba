"""What a model of transformers is given for its cache: it stores the new rows of a step."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.errors import ModelError
from kvpolicy.model.annotating import annotate_stored_rows
from kvpolicy.model.forward_input import ForwardInput
from kvpolicy.model.wrappers import replaced_forward


class StepCache(Cache):
    """The cache of one forward: stores new rows in the slabs."""

    def __init__(self, step: EagerStep, given: ForwardInput, model: PreTrainedModel) -> None:
        # Layers with states are those of transformers, whose code knows what they are for.
        num_layers = len(step.cache.layers) if step.states else 0
        layers: list[Any] = [step.states.get(index) for index in range(num_layers)]
        super().__init__(layers=layers)
        self._step, self._given, self._model = step, given, model

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new rows of a layer; return all rows to attend to, ``[B, H_kv, T, D]``."""
        shape = self._step.cache.layers[layer_idx].shape
        sizes = (shape.head_dim, shape.value_dim)
        for states, size in zip((key_states, value_states), sizes, strict=True):
            expected = (shape.num_kv_heads, size)
            if states.shape[1::2] != expected:
                heads, width = states.shape[1::2]
                msg = (
                    f"the model cannot be run: it stores {heads} heads of size {width} in layer "
                    f"{layer_idx}, where {expected[0]} of size {expected[1]} are expected"
                )
                raise ModelError(msg)
            # Autocast may compute in half precision what is stored in full.
            if torch.promote_types(states.dtype, shape.dtype) != shape.dtype:
                msg = (
                    f"the model cannot be run: it computes keys and values in {states.dtype} that "
                    f"are stored as {shape.dtype}, like its weights; leave out torch.autocast, or "
                    "load the model with another dtype"
                )
                raise ModelError(msg)
        rows = self._step.store(layer_idx, key_states, value_states)
        self._given.newest_layer = layer_idx
        annotate_stored_rows(self._given, layer_idx, key_states, value_states)
        return rows

    def get_mask_sizes(self, *_: Any, **__: Any) -> NoReturn:
        """Asked by models that compute a mask or a bias from the positions of a full cache."""
        msg = (
            "the model cannot be run: it masks its attention, or adds a bias to it, in a way of "
            f"its own, which counts the rows of a full cache{replaced_forward(self._model)}"
        )
        raise ModelError(msg)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen before this forward."""
        return int(self._step.tokens.seq_len.max())
