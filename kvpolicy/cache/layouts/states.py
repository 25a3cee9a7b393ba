"""States of fixed size, as layers of convolutions and recurrences have: one for each slot.

A layer may have states, rows, or both. A state belongs to its slot as rows do: it is moved, cleared
and copied with it. But it is of all tokens so far, so

* a pad would change it: sequences of a forward bring in equally many tokens, see
  `KVCache.enter_together`;
* no token can be taken out of it: a copy is of a sequence as it is now, never of fewer tokens.

The model's code finds a cache layer of transformers with copies of the slots' states, and changes
these; they are written back when the forward is committed.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvpolicy.cache.arena import Arena
from kvpolicy.cache.layouts.base import Layer
from kvpolicy.cache.layouts.tokens import NewTokens
from kvpolicy.cache.shape import LayerShape, Slab


def allocate(
    shapes: Sequence[LayerShape], num_slots: int
) -> tuple[list["StateArena"], dict[int, "StateLayer"]]:
    """Memory for the states of all slots.

    Args:
        shapes: Shape of each layer.
        num_slots: Slots.

    Returns:
        The memory, and the states of each layer that has any, by its number.
    """
    members: dict[LayerShape, list[int]] = {}
    for index, shape in enumerate(shapes):
        if shape.states:
            members.setdefault(shape, []).append(index)
    arenas, layers = [], {}
    for shape, indices in members.items():
        arena = StateArena(shape, Slab(0), len(indices), num_slots)
        arenas.append(arena)
        layers.update({i: StateLayer(i, arena, place) for place, i in enumerate(indices)})
    return arenas, dict(sorted(layers.items()))


class StateArena(Arena):
    """The states of layers of equal shape.

    Attributes:
        states: Each state by its name, ``[layers * S, ...]``; 0 in empty slots.
    """

    def __init__(self, shape: LayerShape, slab: Slab, num_layers: int, num_slots: int) -> None:
        """Allocate the states."""
        super().__init__(shape, slab, num_layers, num_slots)
        num = num_layers * num_slots
        self.states = {
            one.name: shape.zeros(0).new_zeros(num, *one.size, dtype=one.dtype)
            for one in shape.states
        }

    @property
    def tensors(self) -> list[Tensor]:
        """Everything allocated."""
        return [*self.states.values()]

    def clear(self, slot: int) -> None:
        """Empty a slot in all layers."""
        for tensor in self.tensors:
            self.of_slot(tensor, slot).zero_()


class StateLayer(Layer):
    """The states of one layer, which are views of those of its arena.

    Attributes:
        states: Each state by its name, ``[S, ...]``.
    """

    def __init__(self, index: int, arena: StateArena, place: int) -> None:
        """The layer at a place of an arena."""
        super().__init__(index, arena, place)
        self.states = {name: tensor[self.slots] for name, tensor in arena.states.items()}

    def open(self, tokens: NewTokens) -> "OpenStates":
        """Begin a forward."""
        return OpenStates(self, tokens)

    def copy(self, slot: int) -> dict[str, Tensor]:
        """A copy of the states of a slot, by name."""
        return {name: tensor[slot].clone() for name, tensor in self.states.items()}

    def fill(self, slot: int, states: Mapping[str, Tensor]) -> None:
        """Have a slot hold a copy of some states."""
        for name, tensor in self.states.items():
            tensor[slot] = states[name]


class OpenStates(LinearAttentionLayer):
    """The states of the slots of one forward: copies, until it is committed.

    Attributes:
        layer: The layer.
        tokens: The new tokens.
    """

    def __init__(self, layer: StateLayer, tokens: NewTokens) -> None:
        """Copy the states of the slots, unless these are their first tokens."""
        assert not tokens.has_pads, "a pad would enter the states"
        self._places = [(name, *_place(name)) for name in layer.states]
        super().__init__(number_of_states=1 + max(number for *_, number in self._places))
        self.layer, self.tokens = layer, tokens
        begun = tokens.seq_len > 0
        assert begun.all() or not begun.any(), "a first chunk is computed in another way"
        if not begun.all():
            return
        for name, kind, number in self._places:
            held = layer.states[name]
            state = held.index_select(0, tokens.slots_on(held.device))
            self._of(kind)[number] = state
            self.device = state.device  # type: ignore[assignment]
            if kind == "conv":
                self.dtype = state.dtype  # type: ignore[assignment]
                self.conv_kernel_size[number] = state.shape[-1]
                self.is_conv_states_initialized[number] = True
                self.has_previous_state[number] = True
            else:
                self.is_recurrent_states_initialized[number] = True

    @property
    def problem(self) -> str | None:
        """Why the forward has not left the states that are expected; ``None``: it has."""
        for name, kind, number in self._places:
            found, held = self._of(kind).get(number), self.layer.states[name]
            if found is None:
                return f"does not compute state {name} of layer {self.layer.index}"
            if found.shape[1:] != held.shape[1:]:
                return (
                    f"computes state {name} of layer {self.layer.index} in size "
                    f"{list(found.shape[1:])}, after one token {list(held.shape[1:])}"
                )
        return None

    def commit(self) -> None:
        """Make the states those of the slots."""
        for name, kind, number in self._places:
            state = self._of(kind)[number]
            assert state is not None, "see `problem`"
            held = self.layer.states[name]
            held[self.tokens.served_on(held.device)] = state

    def _of(self, kind: str) -> dict[int, Tensor | None]:
        """The states of a kind by number, as transformers has them."""
        states: dict[int, Tensor | None] = getattr(self, f"{kind}_states")
        return states


def _place(name: str) -> tuple[str, int]:
    """Kind and number of a state."""
    kind, _, number = name.partition(".")
    return kind, int(number)
