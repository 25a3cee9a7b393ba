"""Rings: states of the newest tokens of each slot, kept until somebody takes them.

An extension that reads states of several decoded tokens at a time has a ring, which the static step
fills: of each slot the states of tokens that were not taken yet come first, the oldest first. How
many tokens were taken is the extension's to know; the step is told when it begins.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.devices import upload

# In the place of a layer: the last hidden states, which the model gives its head.
LAST_STATES = -1


class StateRing:
    """A ring of each slot for one extension, for one or several places in the model.

    Attributes:
        size: Tokens that fit, ``N``.
        tensors: States by the decoder layer whose attention they enter, or by `LAST_STATES`,
            ``[S, N, M]`` each.
    """

    def __init__(
        self,
        cache: KVCache,
        size: int,
        hidden_size: int,
        dtype: torch.dtype,
        devices: Mapping[int, torch.device],
    ) -> None:
        """Allocate tensors that move and are cleared with the slots of a cache.

        Args:
            cache: The cache.
            size: Tokens that fit.
            hidden_size: Size of a state, ``M``.
            dtype: Precision of states.
            devices: The device of each layer's ring, or of that of `LAST_STATES`.
        """
        self.size = size
        per_slot = (cache.num_slots, size, hidden_size)
        self.tensors = {
            place: torch.zeros(per_slot, dtype=dtype, device=device)
            for place, device in devices.items()
        }
        cache.slot_tensors += self.tensors.values()

    @property
    def layers(self) -> Collection[int]:
        """The layers that it has states of."""
        return self.tensors.keys()

    def take(self, slot: int, num: int, place: int = LAST_STATES) -> Tensor:
        """The first states of a slot, ``[num, M]``; a view, which later steps overwrite."""
        return self.tensors[place][slot, :num]

    def put(self, slot: int, states: Tensor, place: int = LAST_STATES) -> None:
        """Have a slot go on with states, ``[N, M]``, that were copied before."""
        self.tensors[place][slot, : len(states)] = states

    def note(
        self,
        slots: Sequence[int],
        pending: Sequence[int],
        states: Tensor,
        place: int = LAST_STATES,
    ) -> None:
        """Keep the states of a decode step that is not static.

        Args:
            slots: Slots of the step.
            pending: Tokens of each, before this one, that were not taken.
            states: States of their newest tokens, ``[B, M]``.
            place: Where they are from.
        """
        ring = self.tensors[place]
        at = upload(np.array([slots, pending]), ring.device)
        ring[at[0], at[1]] = states.to(ring.dtype)


def put_states(ring: Tensor, states: Tensor, place: Tensor, live: Tensor) -> None:
    """Put one state of every slot that takes part into a ring, in fixed shapes.

    Args:
        ring: States of the slots, ``[S, N, M]``; changed in place.
        states: ``[W, M]``, of the first slots.
        place: Where each goes, ``[W]``, int64.
        live: Slots that take part, bool ``[W]``.
    """
    served = ring[: len(states)]
    place = place.clamp(max=ring.shape[1] - 1)[:, None, None].expand(-1, 1, ring.shape[2])
    new = torch.where(live[:, None, None], states[:, None].to(ring.dtype), served.gather(1, place))
    served.scatter_(1, place, new)
