"""Steering: changes to the states that enter a layer, asked from Python within a forward.

In a graph, asking is one call of the operator ``kvpolicy::steered``: policies run as they are, and
the graph has no break. Whom it asks belongs to the forward under way in its thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# Steers a layer: layer index and the states entering it, [B, M] -> a change to add, or None.
Steer = Callable[[int, Tensor], Tensor | None]

_UNDER_WAY: ContextVar[Steer | None] = ContextVar("steer", default=None)

_LIBRARY = torch.library.Library("kvpolicy", "FRAGMENT")
_LIBRARY.define("steered(Tensor states, int layer_idx) -> Tensor")


@contextmanager
def steering(steer: Steer | None) -> Iterator[None]:
    """Answer the operator in a ``with`` block."""
    token = _UNDER_WAY.set(steer)
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)


def steered(states: Tensor, layer_idx: int) -> Tensor:
    """The states entering a layer, ``[B, M]``, with the change that policies want."""
    output: Tensor = torch.ops.kvpolicy.steered.default(states, layer_idx)
    return output


def _ask(states: Tensor, layer_idx: int) -> Tensor:
    steer = _UNDER_WAY.get()
    assert steer is not None, "a forward that is steered says by whom"
    change = steer(layer_idx, states)
    # An operator may not answer with its argument.
    return states.clone() if change is None else states + change


_LIBRARY.impl("steered", _ask, "CompositeExplicitAutograd")
torch.library.register_fake(
    "kvpolicy::steered", lambda states, _: torch.empty_like(states), lib=_LIBRARY
)
