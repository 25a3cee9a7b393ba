"""What states of fixed size the layers of a model have: found by a forward of one token.

No configuration tells their sizes alike, and the model's own code makes them. So it is run once, on
the device of its weights: with those on ``meta`` nothing is computed.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy.cache.shape import StateShape
from kvpolicy.compat import cache_argument, chooses_experts_on_device
from kvpolicy.errors import ModelError
from kvpolicy.model.failures import explained
from kvpolicy.model.twin import Copies

States = tuple[StateShape, ...]


def layer_states(
    model: PreTrainedModel, config: Any, token_id: int, device: torch.device
) -> list[States]:
    """The states of each layer.

    Args:
        model: The model, which is left as it is.
        config: The configuration of its decoder.
        token_id: Any token.
        device: Device of the model's inputs.

    Raises:
        ModelError: If the model does not run a token, or keeps states in another way.
    """
    twin = Copies(model, None)
    if device.type == "meta":
        for copied in twin.configs:
            chooses_experts_on_device(copied)
    cache = DynamicCache(config=config)
    token = torch.full((1, 1), token_id, device=device)
    try:
        with torch.inference_mode():
            twin.twin.forward(
                input_ids=token,
                position_ids=torch.zeros_like(token),
                use_cache=True,
                **cache_argument(cache),
            )
    except Exception as error:  # whatever code of the model may raise
        raise explained(model, error) from error
    found = [_states_of(layer) for layer in cache.layers]
    if not any(found):
        msg = (
            f"model {type(model).__name__} cannot be run: it keeps the states of its layers in its "
            "own modules and not in the cache, where each sequence would have its own"
        )
        raise ModelError(msg)
    return found


def _states_of(layer: Any) -> States:
    found = []
    for kind in ("conv", "recurrent"):
        states: dict[int, Tensor | None] = getattr(layer, f"{kind}_states", {})
        for number, state in states.items():
            if state is not None:
                found.append(StateShape(f"{kind}.{number}", tuple(state.shape[1:]), state.dtype))
    return tuple(found)
