"""Keys and values of all sequences: what a cache holds of all slots, in all layers.

Every sequence owns one slot. In each layer its rows are held as the layer's layout says
(`kvpolicy.cache.layouts.base`), in memory that is allocated once (`kvpolicy.cache.arena`).
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.arena import Arena, slot_index
from kvpolicy.cache.counts import Counts
from kvpolicy.cache.layouts.base import PLENTY, Layer, LayerCache, Layout, RowLayout
from kvpolicy.cache.layouts.compose import layouts_of, states_of
from kvpolicy.cache.shape import LayerShape, Rotate, Slab

# Decides the layout of each layer, see `layouts_of`.
Compose = Callable[[Sequence[LayerShape], Sequence[Slab], Counts], list[Layout]]


class KVCache:
    """What all layers hold, and how many rows of each slot are filled.

    Attributes:
        layers: Each decoder layer: a `LayerCache` if it has rows.
        layout_of: The layout of each layer; layers of one kind share theirs.
        layouts: The same without repetitions.
        arenas: The memory of layers of equal shape and slab, which the layers are views of, and
            that of states.
        states: The states of fixed size of each layer that has any, by its number.
        counts: What the host knows of the slots, also by the names that follow.
        rows: Rows held in each layer by each slot, ``[layers, S]``; where heads share the rows of a
            layer, those of a head in the mean, rounded up: what is left up to ``capacity`` is
            always the free rows of every head.
        prompt_rows: Rows of each slot in each layer that compactions do not choose from, its first
            ones, ``[layers, S]``: those of its prompt where the plan keeps them, less those that
            have left a sliding window; elsewhere 0.
        compacted_at: Tokens that each slot's sequence had seen at its last compaction in a
            layer, ``[layers, S]``; 0 before the first: its rows are its newest tokens without
            gaps.
        seq_len: Tokens each slot's sequence has seen, ``[S]``.
        prompt_len: Tokens at the beginning of each slot's sequence whose rows stay in layers that
            keep prompts, ``[S]``.
        num_prompt: Tokens that each slot's sequence brings in before it is decoded, ``[S]``.
        rope_offset: What the rotary embedding adds to the positions of tokens to come, ``[S]``: it
            gives the tokens of an image fewer positions than there are.
        num_reserved: Rows of each slot in each layer that no token may have, ``[layers, S]``: the
            budget and the capacity are so much less.
        capacity: Rows allocated for each slot in each layer, ``[layers]``.
        slides: Whether a layer takes any number of tokens without a compaction, because its oldest
            row leaves a full slab with every token, ``[layers]``.
        slot_tensors: Other tensors that belong to the slots; the first axis is the slot.
        row_bytes: Bytes of one row in each layer as it is stored, in all heads of the model,
            ``[layers]``.
        plain_row_bytes: The same in the model's precision.
        rotate: Moves keys of a layer to other positions; ``None`` without a model.
        one_by_one: Whether the model goes on with states by one token at a time only.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slabs: Sequence[Slab],
        num_slots: int,
        compose: Compose = layouts_of,
    ) -> None:
        """Allocate the memory of all slots.

        Args:
            shapes: Shape of each layer.
            slabs: What each of them is to store for a slot.
            num_slots: Slots.
            compose: Decides the layout of each layer.
        """
        self.num_slots = num_slots
        self.counts = counts = Counts(len(shapes), num_slots)
        self.rows, self.prompt_rows = counts.rows, counts.prompt_rows
        self.compacted_at, self.num_reserved = counts.compacted_at, counts.num_reserved
        self.seq_len, self.prompt_len = counts.seq_len, counts.prompt_len
        self.num_prompt, self.rope_offset = counts.num_prompt, counts.rope_offset
        self.capacity = counts.capacity
        layouts = compose(shapes, slabs, self.counts)
        self.layout_of, self.layouts = layouts, list(dict.fromkeys(layouts))
        self._layout_places = np.array([self.layouts.index(one) for one in layouts])
        # Layers without rows are among them; nobody asks these for rows.
        self.layers: list[LayerCache] = []
        self.arenas: list[Arena] = []
        self._state_arenas, self.states = states_of(shapes, num_slots)
        self._allocate(list(zip(shapes, slabs, strict=True)))
        self.slot_tensors: list[Tensor] = []
        self.row_bytes = np.array([layer.row_bytes for layer in self.layers], dtype=np.int64)
        self.plain_row_bytes = np.array([shape.row_bytes for shape in shapes], dtype=np.int64)
        windows = [shape.sliding_window or PLENTY for shape in shapes]
        self._windows = np.array(windows, dtype=np.int64)
        self.rotate: Rotate | None = None
        self.one_by_one = False

    @property
    def layers_with_rows(self) -> list[LayerCache]:
        """The layers that hold rows; `Layer.index` is the number of each."""
        return [layer for layer in self.layers if layer.shape.has_rows]

    # What the host knows of the slots

    @property
    def transient_bytes(self) -> int:
        """The largest temporary copy so far: of a compaction, a forward, or a growing slab."""
        return self.counts.transient_bytes

    def fullest(
        self, layers: int | Sequence[int] | np.ndarray, slots: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Rows of the fullest KV head that a compaction chooses from, ``[B]``.

        Args:
            layers: The layer of each of the slots, or of all.
            slots: The slots, ``B``.
        """
        chosen = np.asarray(slots)
        of_each = np.broadcast_to(layers, chosen.shape)
        fullest, layouts = np.empty_like(chosen), self._layout_places[of_each]
        for place, layout in enumerate(self.layouts):
            own = layouts == place
            if own.any():
                fullest[own] = cast(RowLayout, layout).fullest(of_each[own], chosen[own])
        return fullest - self.prompt_rows[of_each, chosen]

    def num_candidates(self, slots: Sequence[int] | slice) -> np.ndarray:
        """Rows of these slots that a compaction chooses from, ``[layers, B]``."""
        index = slots if isinstance(slots, slice) else slot_index(slots)
        candidates: np.ndarray = self.rows[:, index] - self.prompt_rows[:, index]
        return candidates

    def admits(self, num_prompt: int) -> bool:
        """Whether a sequence with so many prompt tokens may be given a free slot now."""
        return all(layout.admits(num_prompt) for layout in self.layouts)

    def enter_together(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether one forward may bring in so many prompt tokens of each of these slots.

        States take no pads, and the first tokens of a sequence are computed in another way.
        """
        if self.states and len(slots) > 1:
            begun = self.seq_len[slot_index(slots)] > 0
            if len(set(lengths)) > 1 or begun.any() != begun.all():
                return False
        return all(layout.enter_together(slots, lengths) for layout in self.layouts)

    @property
    def can_take_back(self) -> bool:
        """Whether a slot can be copied as of fewer tokens, as long as it was not compacted.

        Rows that have left unseen cannot be put back, nor exact copies of rows that are not among
        the newest any more, and no token can be taken out of a state.
        """
        return not self.fixed_bytes and not any(
            isinstance(layout, RowLayout) and layout.drops_unseen for layout in self.layouts
        )

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a slot that are of all its tokens: states, and exact copies of newest rows."""
        return self.state_bytes + sum(layer.exact_bytes for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a slot, whatever its tokens."""
        return sum(layer.shape.state_bytes for layer in self.states.values())

    def num_free_rows(self, slots: Sequence[int]) -> np.ndarray:
        """Tokens that each of these slots can still take in every layer, ``[B]``."""
        least: np.ndarray = self.room(slots).min(axis=0, initial=PLENTY)
        return least

    def most_new(self, slots: Sequence[int]) -> np.ndarray:
        """Tokens that one forward may bring in of each of these slots, ``[B]``."""
        free = self.num_free_rows(slots)
        if not self.one_by_one:
            return free
        return np.where(self.seq_len[slot_index(slots)] > 0, np.minimum(free, 1), free)

    def room(self, slots: Sequence[int]) -> np.ndarray:
        """Tokens that these slots take in each layer before one is due, ``[layers, B]``."""
        room = np.empty((len(self.layers), len(slots)), dtype=np.int64)
        for layout in self.layouts:
            room[layout.own] = layout.room(slots)
        return room

    def full(self, slots: Sequence[int]) -> np.ndarray:
        """Which of these slots cannot take another token, bool ``[layers, B]``."""
        full = np.empty((len(self.layers), len(slots)), dtype=bool)
        for layout in self.layouts:
            full[layout.own] = layout.full(slots)
        return full

    def count(self, slots: Sequence[int] | np.ndarray, num_new: int | np.ndarray) -> None:
        """Count new tokens of some slots, ``[B]``, and their rows in every layer."""
        counts, chosen, index = self.counts, np.asarray(slots), slot_index(slots)
        rows = counts.rows[:, index] + num_new
        held = counts.rows[:, index] = np.minimum(rows, self._most_rows[:, None])
        for layout in self.layouts:
            layout.count(chosen, num_new, rows - held)
        counts.seq_len[index] += num_new

    def drop_unseen(self, places: Sequence[tuple[int, int]], make_rows: Callable[..., Any]) -> None:
        """Drop rows that no later query can see, of slots, each in a layer.

        Does nothing in layers where no row leaves unseen. Else it reads the positions of all of
        them at once: between compactions that leave gaps, only the device knows them.

        Args:
            places: Layers and slots.
            make_rows: Makes the rows that hooks see, of this cache, in layers and slots; the rows
                of several processes are those of all heads.
        """
        places = [one for one in places if self.layers[one[0]].layout.drops_unseen]
        if not places:
            return
        unseen = [make_rows(self, [layer], [slot]).out_of_sight for layer, slot in places]
        counts = [one.sum(dim=2).amin() for one in unseen]
        hidden = torch.stack([count.to(counts[0].device) for count in counts]).tolist()
        for (layer_idx, slot), num in zip(places, hidden, strict=True):
            layer = self.layers[layer_idx]
            layer.layout.drop_unseen(layer, slot, num)

    # Memory

    @property
    def num_bytes(self) -> int:
        """Bytes allocated: slabs, positions, tracks, query windows, other slot tensors."""
        of_arenas = sum(arena.num_bytes for arena in self.arenas)
        return of_arenas + sum(tensor.nbytes for tensor in self.slot_tensors)

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated plus the largest temporary copy so far."""
        return self.num_bytes + self.transient_bytes

    def full_bytes(self, slot: int) -> int:
        """Bytes that a full cache in the model's precision holds for the tokens of a slot."""
        of_rows = np.minimum(self.seq_len[slot], self._windows) @ self.plain_row_bytes
        return int(of_rows) + self.state_bytes

    def grow(self, slabs: Sequence[Slab]) -> None:
        """Grow layers to the capacity of their new slab, arena by arena; none ever shrinks."""
        wanted, grows = [], False
        for layer, layout, slab in zip(self.layers, self.layout_of, slabs, strict=True):
            larger = layout.fit(layer.shape, slab).capacity > layer.slab.capacity
            wanted.append((layer.shape, slab if larger else layer.slab))
            grows |= larger
        if grows:
            self._allocate(wanted)

    def _allocate(self, wanted: list[tuple[LayerShape, Slab]]) -> None:
        """Make arenas for layers of such shapes and slabs, with the rows of the layers before."""
        before: list[Layer | None] = [*self.layers]
        self.layers, self.arenas = [], [*self._state_arenas]
        layers: dict[int, Layer] = {}
        kinds = [
            (layout, shape, layout.fit(shape, slab))
            for layout, (shape, slab) in zip(self.layout_of, wanted, strict=True)
        ]
        for kind in dict.fromkeys(kinds):
            layout, shape, slab = kind
            members = [i for i, one in enumerate(kinds) if one == kind]
            old = [one for i in members if before and (one := before[i]) is not None]
            if old and _is_arena_of(old, slab):
                self.arenas.append(old[0].arena)
                layers.update(zip(members, old, strict=True))
                continue
            arena = layout.new_arena(shape, slab, len(members), self.num_slots)
            self.arenas.append(arena)
            for place, i in enumerate(members):
                layers[i] = layout.new_layer(i, arena, place)
            if old:
                self._widen(layout, old, [layers[i] for i in members])
                for i in members:
                    before[i] = None  # so that their slabs are freed before the next are allocated
        self.layers = [cast(LayerCache, layers[layer_idx]) for layer_idx in range(len(wanted))]
        self.counts.capacity[:] = [layer.slab.capacity for layer in self.layers]
        self._most_rows = np.array([layer.slab.most_rows for layer in self.layers], dtype=np.int64)
        self.slides = np.array([layer.slides for layer in self.layers], dtype=bool)
        pairs = list(zip(self.layers, self.layout_of, strict=True))
        for layout in self.layouts:
            layout.attach([layer for layer, one in pairs if one is layout])

    def _widen(self, layout: Layout, old: Sequence[Layer], new: Sequence[Layer]) -> None:
        """Copy what layers hold to larger ones."""
        for small, large in zip(old, new, strict=True):
            large.softmax = small.softmax
            layout.widen(small, large)
        self.counts.note_copy(sum(layer.num_bytes for layer in old))

    # Slots

    def clear(self, slot: int) -> None:
        """Empty a slot in all layers."""
        for arena in self.arenas:
            arena.clear(slot)
        for tensor in self.slot_tensors:
            tensor[slot] = 0
        for array in self.counts.per_slot:
            array[..., slot] = 0
        for layout in self.layouts:
            layout.clear(slot)

    def take(self, source: "KVCache", slots: Sequence[int]) -> None:
        """Fill all slots with copies of slots of another cache for the same layers, or of this one.

        Args:
            source: The other cache; it has the same capacity in every layer.
            slots: Which of its slots goes to each slot here.
        """
        chosen = list(slots)
        copied: list[tuple[Tensor, Tensor]] = []
        for layer, other in zip(self.layers, source.layers, strict=True):
            layer.softmax = other.softmax
            copied += zip(layer.tensors, other.tensors, strict=True)
        for index, states in self.states.items():
            copied += zip(states.tensors, source.states[index].tensors, strict=True)
        copied += zip(self.slot_tensors, source.slot_tensors, strict=True)
        self.counts.transient_bytes = source.transient_bytes
        for target, tensor in copied:
            contents = tensor[chosen]  # a copy, so a slot may go to several
            self.counts.note_copy(contents.nbytes)
            target.copy_(contents)
        for array, numbers in zip(self.counts.per_slot, source.counts.per_slot, strict=True):
            array[...] = numbers[..., chosen]
        for layout, known in zip(self.layouts, source.layouts, strict=True):
            layout.take(known, chosen)

    def move(self, source: int, target: int) -> None:
        """Move the sequence in slot ``source`` to slot ``target``, and empty ``source``."""
        for arena in self.arenas:
            arena.copy_slot(source, target)
        for tensor in self.slot_tensors:
            tensor[target] = tensor[source]
        for array in self.counts.per_slot:
            array[..., target] = array[..., source]
        for layout in self.layouts:
            layout.move(source, target)
        self.clear(source)

    def swap(self, first: int, second: int) -> None:
        """Exchange the sequences in two slots."""
        pair, swapped = [first, second], [second, first]
        for arena in self.arenas:
            self.counts.note_copy(arena.swap_slots(first, second))
        for tensor in self.slot_tensors:
            tensor[pair] = tensor[swapped]
        for array in self.counts.per_slot:
            array[..., pair] = array[..., swapped]
        for layout in self.layouts:
            layout.swap(first, second)


def _is_arena_of(layers: Sequence[Layer], slab: Slab) -> bool:
    """Whether layers are exactly those of one arena, and have such slabs."""
    arena: Arena = layers[0].arena
    return (
        arena.slab == slab
        and arena.num_layers == len(layers)
        and all(layer.arena is arena for layer in layers)
    )
