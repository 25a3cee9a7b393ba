"""Steering: changes to the states that enter a layer, asked from Python within a forward.

In a graph, asking is one call of the operator ``kvpolicy::steered``: policies run as they are, and
the graph has no break.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.cache.static_step import StaticStep
from kvpolicy.model.forward_input import ForwardInput, forward_under_way

_LIBRARY = torch.library.Library("kvpolicy", "FRAGMENT")
_LIBRARY.define("steered(Tensor states, int layer_idx) -> Tensor")


def steering_hook(layer_idx: int) -> Any:
    """Changes what enters a layer, as the forward under way wants it."""

    def steer(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: ForwardInput = kwargs["kvpolicy_forward"]
        if given.steer is None:
            return None
        states = args[0]  # [B, 1, M]
        if isinstance(given.step, StaticStep) and given.step.in_graph:
            return (_STEERED(states[:, -1], layer_idx)[:, None], *args[1:]), kwargs
        change = given.steer(layer_idx, states[:, -1])
        return None if change is None else ((states + change[:, None], *args[1:]), kwargs)

    return steer


def _ask(states: Tensor, layer_idx: int) -> Tensor:
    steer = forward_under_way().steer
    assert steer is not None, "a forward that is steered says by whom"
    change = steer(layer_idx, states)
    # An operator may not answer with its argument.
    return states.clone() if change is None else states + change


_LIBRARY.impl("steered", _ask, "CompositeExplicitAutograd")
torch.library.register_fake(
    "kvpolicy::steered", lambda states, _: torch.empty_like(states), lib=_LIBRARY
)
_STEERED = torch.ops.kvpolicy.steered.default
