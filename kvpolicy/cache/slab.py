"""Keys and values of all sequences: slabs of rows, allocated once and compacted in place.

Every sequence owns one slot. In each layer a slot is a slab of ``capacity`` rows; the first
``rows`` of them hold tokens, in order of position, the rest are empty. Where the heads of a layer
share its rows, it is a pool in which they have segments, see `kvpolicy.cache.segments`.
"""

import sys
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.softmax import PLAIN
from kvpolicy.cache.segments import counts_of, even_bounds, places_of, stretched
from kvpolicy.devices import Download, upload

# Counts of `KVCache` for each slot; the last axis is the slot.
_PER_SLOT = ("rows", "prompt_rows", "compacted_at", "num_pads", "seq_len", "prompt_len", "lead")

# The room of a slot that may hold as many rows behind its prompt as its slab can.
UNLIMITED = sys.maxsize // 2

# Moves keys: layer index, keys [B, H_kv, K, D], positions to add [B, H_kv, K] -> moved keys.
Rotate = Callable[[int, Tensor, Tensor], Tensor]


@attrs.frozen
class LayerShape:
    """Shape, precision and device of one layer's keys and values, and its sliding window.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Size of one head.
        dtype: Precision of keys and values.
        device: Device of keys and values.
        sliding_window: Tokens a query sees, its own included: the query at position p sees
            rows at positions above ``p - sliding_window``. ``None``: all rows before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of one token in this layer, in all heads."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def zeros(self, *size: int) -> Tensor:
        """Zeros in this layer's dtype and on its device."""
        return torch.zeros(size, dtype=self.dtype, device=self.device)


@attrs.frozen
class Slab:
    """What one layer stores for every sequence.

    Attributes:
        capacity: Rows allocated for each slot.
        window_size: Most recent queries to store, 0 for none.
        tracks: Names of per-row fp32 numbers that travel with the rows. Those of accumulators are
            updated by attention.
        room: Rows that a slot may hold behind those of its prompt, which stay; ``None``: rows of
            prompts are evicted like others.
        ragged: Whether KV heads may hold different numbers of rows. Then ``capacity`` is the room
            of a head in the mean.
    """

    capacity: int
    window_size: int = 0
    tracks: tuple[str, ...] = ()
    room: int | None = None
    ragged: bool = False


def slot_index(slots: Sequence[int]) -> slice | list[int]:
    """An index of slots: those in equal steps as a slice, which is read as a view."""
    first, last = slots[0], slots[-1]
    step = slots[1] - first if len(slots) > 1 else 1
    evenly = range(first, last + 1, step) if step > 0 else ()
    return slice(first, last + 1, step) if list(slots) == list(evenly) else list(slots)


class SlabStack:
    """The slabs of layers of equal shape, in one tensor for all of them.

    Layers and slots share the first axis, so that a compaction can treat the slots of several
    layers as a batch: layer ``i`` of the stack has its slots at ``[i * S, (i + 1) * S)``.

    Attributes:
        shape: Shape of each layer.
        slab: What each layer stores for a slot; with a sliding window, no more rows than that.
        num_layers: Layers of the stack.
        num_slots: Slots, ``S``.
        slides: Whether a slab holds a whole sliding window; such a layer takes any number of
            tokens without a compaction.
        keys: Keys after RoPE, ``[layers * S, H_kv, capacity, D]``.
        values: Values, likewise.
        positions: Position of each row's token in its sequence, ``[layers * S, H_kv, capacity]``,
            int64, strictly rising along the rows, -1 where empty.
        tracks: Per-row numbers by name, ``[layers * S, H_kv, capacity]``, fp32, 0 where empty.
        window: The last queries after RoPE, ``[layers * S, H_q, W, D]``: the query at position p
            is stored at index ``p % W``. ``None`` if no policy reads queries.
        bounds: Where the segments of the KV heads begin and end if slabs are ragged,
            ``[layers * S, H_kv + 1]``, int64; see `kvpolicy.cache.segments`. ``None``: they are
            not.
    """

    def __init__(self, shape: LayerShape, slab: Slab, num_layers: int, num_slots: int) -> None:
        """Allocate the slabs."""
        assert not (slab.ragged and shape.sliding_window), "a plan refuses it"
        most = shape.sliding_window or slab.capacity
        slab = attrs.evolve(slab, capacity=min(slab.capacity, most))
        self.shape, self.slab = shape, slab
        self.num_layers, self.num_slots = num_layers, num_slots
        self.slides = slab.capacity == shape.sliding_window
        rows = (num_layers * num_slots, shape.num_kv_heads, slab.capacity)
        self.keys = shape.zeros(*rows, shape.head_dim)
        self.values = shape.zeros(*rows, shape.head_dim)
        self.positions = torch.full(rows, -1, dtype=torch.int64, device=shape.device)
        self.tracks = {
            name: torch.zeros(rows, dtype=torch.float32, device=shape.device)
            for name in slab.tracks
        }
        self.window: Tensor | None = None
        if slab.window_size:
            self.window = shape.zeros(rows[0], shape.num_heads, slab.window_size, shape.head_dim)
        self.bounds: Tensor | None = None
        if slab.ragged:
            self.bounds = self._even_bounds().repeat(rows[0], 1)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything allocated; the first axis is always layers and slots."""
        tensors = [self.keys, self.values, self.positions, *self.tracks.values()]
        return [*tensors, *(one for one in (self.window, self.bounds) if one is not None)]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def clear(self, slot: int) -> None:
        """Empty a slot in all layers.

        Keys and values are zeroed, too: empty rows are masked, but a NaN or an infinity in one
        would pass any mask, since 0 * NaN is NaN.
        """
        for tensor in (self.keys, self.values, *self.tracks.values()):
            self._of_slot(tensor, slot).zero_()
        self._of_slot(self.positions, slot).fill_(-1)
        if self.bounds is not None:
            self._of_slot(self.bounds, slot).copy_(self._even_bounds())

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the contents of slot ``source`` to slot ``target`` in all layers."""
        for tensor in self.tensors:
            self._of_slot(tensor, target).copy_(self._of_slot(tensor, source))

    def swap_slots(self, first: int, second: int) -> int:
        """Exchange two slots in all layers; returns the bytes of the largest temporary copy."""
        most = 0
        for tensor in self.tensors:
            held = self._of_slot(tensor, first).clone()
            self._of_slot(tensor, first).copy_(self._of_slot(tensor, second))
            self._of_slot(tensor, second).copy_(held)
            most = max(most, held.nbytes)
        return most

    def _of_slot(self, tensor: Tensor, slot: int) -> Tensor:
        """A slot in all layers, a view."""
        return tensor[slot :: self.num_slots]

    def _even_bounds(self) -> Tensor:
        """The bounds of an empty slot."""
        return even_bounds(self.shape.num_kv_heads, self.slab.capacity, self.shape.device)


class LayerCache:
    """The slabs of one layer, which are views of those of its stack.

    Attributes:
        stack: The slabs of this layer and of others of equal shape.
        first: Place of its first slot in the stack.
        shape: Its shape.
        slab: What it stores for a slot.
        slides: Whether a slab holds a whole sliding window.
        keys: Keys after RoPE, ``[S, H_kv, capacity, D]``.
        values: Values, ``[S, H_kv, capacity, D]``.
        positions: Position of each row's token in its sequence, ``[S, H_kv, capacity]``.
        tracks: Per-row numbers by name, ``[S, H_kv, capacity]``.
        accumulators: Names of the tracks that attention updates.
        window: The last queries after RoPE, ``[S, H_q, W, D]``, or ``None``; see `SlabStack`.
        bounds: Bounds of the segments of the heads, ``[S, H_kv + 1]``, or ``None``; see
            `SlabStack`.
        softmax: The softmax that the layer used in its last forward.
    """

    def __init__(self, stack: SlabStack, index: int) -> None:
        """The layer at an index of a stack."""
        self.stack, self.first = stack, index * stack.num_slots
        self.shape, self.slab, self.slides = stack.shape, stack.slab, stack.slides
        self.softmax = PLAIN
        own = slice(self.first, self.first + stack.num_slots)
        self.keys, self.values = stack.keys[own], stack.values[own]
        self.positions = stack.positions[own]
        self.tracks = {name: track[own] for name, track in stack.tracks.items()}
        self.accumulators = [name for name in ACCUMULATORS if name in self.tracks]
        self.window = None if stack.window is None else stack.window[own]
        self.bounds = None if stack.bounds is None else stack.bounds[own]

    @property
    def slabs(self) -> list[Tensor]:
        """What has a place for every row; the first axis is always the slot."""
        return [self.keys, self.values, self.positions, *self.tracks.values()]

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that belongs to this layer; the first axis is always the slot."""
        return [*self.slabs, *(one for one in (self.window, self.bounds) if one is not None)]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for this layer."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy_rows(self, source: "LayerCache") -> None:
        """Copy the contents of all slots of a layer whose slabs are not larger."""
        self.softmax = source.softmax
        if self.window is not None and source.window is not None:
            self.window[:, :, : source.window.shape[2]] = source.window
        by = self.slab.capacity - source.slab.capacity
        for old, new in zip(source.slabs, self.slabs, strict=True):
            if source.bounds is None:
                new[:, :, : old.shape[2]] = old
            else:
                stretched(old, source.bounds, new, by)
        if self.bounds is not None and source.bounds is not None:
            more = even_bounds(self.shape.num_kv_heads, by, self.shape.device)
            self.bounds.copy_(source.bounds + more)

    def put(self, slab: Tensor, slots: Tensor, rows: Tensor, new: Tensor) -> None:
        """Write rows of a slab of this layer.

        Args:
            slab: One of `slabs`, changed in place.
            slots: Slot of each row, ``[N]``.
            rows: Its number, see `kvpolicy.cache.segments`; where heads share nothing, its place in
                the slab.
            new: Its contents, ``[N, H_kv, ...]``.
        """
        if self.bounds is None:
            slab[slots, :, rows] = new
        else:
            places, _ = places_of(self.bounds[slots], self.slab.capacity, rows[:, None, None])
            of_heads = new.expand(-1, places.shape[1], *new.shape[2:]).to(slab.dtype)
            slab.flatten(1, 2)[slots[:, None], places[:, :, 0]] = of_heads

    def columns(
        self, served: slice | list[int], rows: np.ndarray, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Where the rows of ragged slabs lie that are aligned on the right.

        Args:
            served: Index of some slots.
            rows: Their rows, as `KVCache` counts them, ``[B]``.
            num_rows: Columns, ``T``: rows of the fullest head.

        Returns:
            Places in the pools of the slots, ``[B, H_kv, T]``, and which of them have a row, bool.
        """
        assert self.bounds is not None, "these slabs are ragged"
        device = self.shape.device
        numbers = upload(rows, device)[:, None, None] + torch.arange(-num_rows, 0, device=device)
        return places_of(self.bounds[served], self.slab.capacity, numbers)

    def gathered(
        self, slab: Tensor, served: slice | list[int], places: Tensor, present: Tensor
    ) -> Tensor:
        """Keys or values of some slots in columns, ``[B, H_kv, T, D]``, 0 where there is no row.

        Args:
            slab: One of `slabs`.
            served: Index of the slots.
            places: See `columns`.
            present: See there.
        """
        index = places.flatten(1)[..., None].expand(-1, -1, slab.shape[3])
        rows = slab[served].flatten(1, 2).gather(1, index).reshape(*places.shape, -1)
        return rows.masked_fill_(~present[..., None], 0)

    def newest(self, slab: Tensor, slot: int, num_rows: int, num: int) -> Tensor:
        """The newest rows of a slot in one of `slabs`, ``[H_kv, num, ...]``.

        All of them have come since the last compaction, so every head has them.

        Args:
            slab: The slab.
            slot: The slot.
            num_rows: Rows that a head holds, see `KVCache`.
            num: How many to give.
        """
        if self.bounds is None:
            return slab[slot, :, num_rows - num : num_rows]
        return slab[slot].flatten(0, 1)[self._newest_places(slot, num_rows, num)]

    def put_newest(self, slab: Tensor, slot: int, num_rows: int, new: Tensor) -> None:
        """Write the newest rows of a slot, ``[H_kv, num, ...]``; see `newest`."""
        num = new.shape[1]
        if self.bounds is None:
            slab[slot, :, num_rows - num : num_rows] = new
        else:
            places = self._newest_places(slot, num_rows, num)
            slab[slot].flatten(0, 1)[places] = new.to(slab.dtype)

    def _newest_places(self, slot: int, num_rows: int, num: int) -> Tensor:
        assert self.bounds is not None
        numbers = torch.arange(num_rows - num, num_rows, device=self.bounds.device)
        places, _ = places_of(self.bounds[slot : slot + 1], self.slab.capacity, numbers)
        return places[0]

    def held(self, slot: int, num_rows: int, slab: Tensor) -> list[Tensor]:
        """The rows of each KV head of a slot in one of `slabs`, without the free ones.

        Reads the bounds of the slot.

        Args:
            slot: The slot.
            num_rows: Rows that a head holds in the mean, see `KVCache`.
            slab: The slab.
        """
        if self.bounds is None:
            return list(slab[slot, :, :num_rows])
        bounds, capacity = self.bounds[slot : slot + 1], self.slab.capacity
        counts = counts_of(bounds, capacity, num_rows)[0].tolist()
        pool = slab[slot].flatten(0, 1)
        firsts = bounds[0].tolist()
        return [pool[first : first + num] for first, num in zip(firsts, counts, strict=False)]


class KVCache:
    """The slabs of all layers, and how many rows of each slot are filled.

    Attributes:
        layers: One `LayerCache` for each decoder layer.
        stacks: The slabs of layers of equal shape and slab, which the layers are views of.
        rows: Rows held in each layer by each slot, ``[layers, S]``; where heads share the rows of a
            layer, those of a head in the mean, rounded up: what is left up to ``capacity`` is
            always the free rows of every head.
        prompt_rows: Rows of each slot in each layer that compactions do not choose from, its first
            ones, ``[layers, S]``: those of its prompt where the plan keeps them, less those that
            have left a sliding window; elsewhere 0.
        capacity: Rows allocated for each slot in each layer, ``[layers]``.
        keeps_prompt: Whether the rows of prompts stay in a layer, ``[layers]``.
        room: Rows that a slot may hold behind those of its prompt in a layer, ``[layers]``; no
            limit where rows of prompts do not stay.
        slides: Whether a layer's slabs hold a whole sliding window, ``[layers]``: they need no
            compaction when full, because with every token one row leaves the window.
        compacted_at: Tokens that each slot's sequence had seen at its last compaction in a
            layer, ``[layers, S]``; 0 before the first: its rows are its newest tokens without
            gaps.
        seq_len: Tokens each slot's sequence has seen, ``[S]``.
        prompt_len: Tokens at the beginning of each slot's sequence whose rows stay in layers that
            keep prompts, ``[S]``.
        num_pads: Rows of each slot in each layer that stored padding takes up,
            ``[layers, S]``; 0 unless the plan says ``padding = "stored"``.
        lead: Rows that the fullest head of a slot holds more than ``rows``, ``[layers, S]``: 0
            unless the layer's slabs are ragged. May be negative. `fullest` is up to date on a GPU,
            too.
        slot_tensors: Other tensors that belong to the slots; the first axis is the slot.
        row_bytes: Bytes of one row in each layer, in all heads of the model, ``[layers]``.
        transient_bytes: The largest temporary copy so far: made by a compaction, a sliding
            window, or a growing slab.
        rotate: Moves keys of a layer to other positions; ``None`` without a model.
    """

    def __init__(self, shapes: Sequence[LayerShape], slabs: Sequence[Slab], num_slots: int) -> None:
        self.num_slots = num_slots
        self.transient_bytes = 0
        self.layers: list[LayerCache] = []
        self.stacks: list[SlabStack] = []
        self._stack_layers(list(zip(shapes, slabs, strict=True)))
        self.rows = np.zeros((len(self.layers), num_slots), dtype=np.int64)
        self.prompt_rows = np.zeros_like(self.rows)
        self.compacted_at = np.zeros_like(self.rows)
        self.seq_len = np.zeros(num_slots, dtype=np.int64)
        self.prompt_len = np.zeros(num_slots, dtype=np.int64)
        self.num_pads = np.zeros_like(self.rows)
        self.lead = np.zeros_like(self.rows)
        self._coming: list[_ComingLead] = []
        self.slot_tensors: list[Tensor] = []
        self.row_bytes = np.array([shape.row_bytes for shape in shapes], dtype=np.int64)
        windows = [shape.sliding_window or sys.maxsize for shape in shapes]
        self._windows = np.array(windows, dtype=np.int64)
        self.rotate: Rotate | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes allocated: slabs, positions, tracks, query windows, other slot tensors."""
        of_stacks = sum(stack.num_bytes for stack in self.stacks)
        return of_stacks + sum(tensor.nbytes for tensor in self.slot_tensors)

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated plus the largest temporary copy so far."""
        return self.num_bytes + self.transient_bytes

    def full_bytes(self, slot: int) -> int:
        """Bytes of keys and values that a full cache holds for the tokens of a slot."""
        return int(np.minimum(self.seq_len[slot], self._windows) @ self.row_bytes)

    def grow(self, slabs: Sequence[Slab]) -> None:
        """Grow layers to the capacity of their new slab, stack by stack; none ever shrinks."""
        grows = [
            new.capacity > layer.slab.capacity and not layer.slides
            for layer, new in zip(self.layers, slabs, strict=True)
        ]
        if any(grows):
            wanted = [
                (layer.shape, new if larger else layer.slab)
                for layer, new, larger in zip(self.layers, slabs, grows, strict=True)
            ]
            self._stack_layers(wanted)

    def _stack_layers(self, wanted: list[tuple[LayerShape, Slab]]) -> None:
        """Make stacks for layers of such shapes and slabs, with the rows of the layers before."""
        before: list[LayerCache | None] = [*self.layers]
        self.layers, self.stacks = [], []
        layers: dict[int, LayerCache] = {}
        for shape, slab in dict.fromkeys(wanted):
            members = [i for i, one in enumerate(wanted) if one == (shape, slab)]
            old = [one for i in members if before and (one := before[i]) is not None]
            if old and _is_stack_of(old, slab):
                self.stacks.append(old[0].stack)
                layers.update(zip(members, old, strict=True))
                continue
            stack = SlabStack(shape, slab, len(members), self.num_slots)
            self.stacks.append(stack)
            layers.update((i, LayerCache(stack, index)) for index, i in enumerate(members))
            for small, i in zip(old, members, strict=False):
                layers[i].copy_rows(small)
                before[i] = None  # so that slabs are freed as soon as all their layers are copied
            self.note_copy(sum(layer.num_bytes for layer in old))
        self.layers = [layers[layer_idx] for layer_idx in range(len(wanted))]
        self.capacity = np.array([layer.slab.capacity for layer in self.layers], dtype=np.int64)
        self.slides = np.array([layer.slides for layer in self.layers], dtype=bool)
        rooms = [layer.slab.room for layer in self.layers]
        self.keeps_prompt = np.array([room is not None for room in rooms], dtype=bool)
        self.room = np.array([UNLIMITED if room is None else room for room in rooms])
        self._keeps_prompts = bool(self.keeps_prompt.any())

    def fullest(self, layer_idx: int, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Rows of the fullest KV head of some slots in a layer, ``[B]``.

        Waits for the last compaction of heads that share their rows, if it is not done.
        """
        self._read_leads()
        chosen = np.asarray(slots)
        most: np.ndarray = self.rows[layer_idx, chosen] + self.lead[layer_idx, chosen]
        return most

    def note_leads(self, layers: Sequence[int], slots: Sequence[int], leads: Tensor) -> None:
        """Note `lead` of some slots, each in a layer, ``[B]``, after a compaction."""
        download = Download(leads)
        self._coming.append(_ComingLead(np.array(layers), np.array(slots), download))
        if leads.device.type == "cpu":
            self._read_leads()

    def _read_leads(self) -> None:
        for one in self._coming:
            here = one.slots >= 0
            self.lead[one.layers[here], one.slots[here]] = one.leads.read()[here]
        self._coming = []

    def clear(self, slot: int) -> None:
        """Empty a slot in all layers."""
        for one in self._coming:
            one.slots[one.slots == slot] = -1
        for stack in self.stacks:
            stack.clear(slot)
        for tensor in self.slot_tensors:
            tensor[slot] = 0
        for name in _PER_SLOT:
            getattr(self, name)[..., slot] = 0

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
        copied += zip(self.slot_tensors, source.slot_tensors, strict=True)
        self.transient_bytes = source.transient_bytes
        for target, tensor in copied:
            contents = tensor[chosen]  # a copy, so a slot may go to several
            self.note_copy(contents.nbytes)
            target.copy_(contents)
        source._read_leads()
        self._coming = []
        for name in _PER_SLOT:
            setattr(self, name, getattr(source, name)[..., chosen])

    def move(self, source: int, target: int) -> None:
        """Move the sequence in slot ``source`` to slot ``target``, and empty ``source``."""
        for stack in self.stacks:
            stack.copy_slot(source, target)
        for tensor in self.slot_tensors:
            tensor[target] = tensor[source]
        for one in self._coming:
            one.slots[one.slots == source] = target
        for name in _PER_SLOT:
            array = getattr(self, name)
            array[..., target] = array[..., source]
        self.clear(source)

    def swap(self, first: int, second: int) -> None:
        """Exchange the sequences in two slots."""
        pair, swapped = [first, second], [second, first]
        for stack in self.stacks:
            self.note_copy(stack.swap_slots(first, second))
        for tensor in self.slot_tensors:
            tensor[pair] = tensor[swapped]
        for one in self._coming:
            one.slots[:] = np.select(
                [one.slots == first, one.slots == second], [second, first], one.slots
            )
        for name in _PER_SLOT:
            array = getattr(self, name)
            array[..., pair] = array[..., swapped]

    def count(self, slots: Sequence[int] | np.ndarray, num_new: int | np.ndarray) -> None:
        """Count new tokens of some slots, ``[B]``, and their rows in every layer."""
        chosen = np.asarray(slots)
        rows = self.rows[:, chosen] + num_new
        held = self.rows[:, chosen] = np.minimum(rows, self.capacity[:, None])
        if self._keeps_prompts:
            of_prompt = np.clip(self.prompt_len[chosen] - self.seq_len[chosen], 0, num_new)
            prompt_rows = self.prompt_rows[:, chosen] + of_prompt * self.keeps_prompt[:, None]
            # What has left a sliding window were the first rows.
            self.prompt_rows[:, chosen] = np.maximum(prompt_rows - (rows - held), 0)
        self.seq_len[chosen] += num_new

    def drop_first(
        self, layer_idx: int, slots: Sequence[int] | np.ndarray, num: int | np.ndarray
    ) -> None:
        """Count the first rows of some slots of a layer, ``[B]``, as gone."""
        self.rows[layer_idx, slots] -= num
        prompt_rows = self.prompt_rows[layer_idx, slots] - num
        self.prompt_rows[layer_idx, slots] = np.maximum(prompt_rows, 0)

    def num_candidates(self, slots: Sequence[int]) -> np.ndarray:
        """Rows of these slots that a compaction chooses from, ``[layers, B]``."""
        candidates: np.ndarray = self.rows[:, slots] - self.prompt_rows[:, slots]
        return candidates

    def num_hidden_prompt_rows(self, layer_idx: int, slot: int) -> int:
        """Rows of a slot's prompt that stay in a layer, and have left its sliding window."""
        held, prompt_len = self.prompt_rows[layer_idx, slot], self.prompt_len[slot]
        in_sight = prompt_len - (self.seq_len[slot] - self._windows[layer_idx] + 1)
        return int(held - np.clip(in_sight, 0, held))

    def num_free_rows(self, slots: Sequence[int]) -> np.ndarray:
        """Tokens that each of these slots can still take in every layer, ``[B]``.

        Layers with a whole sliding window take any number.
        """
        free = self.capacity[:, None] - self.num_pads[:, slots] - self.rows[:, slots]
        least: np.ndarray = free[~self.slides].min(axis=0, initial=sys.maxsize)
        if self._keeps_prompts:
            room = (self.room[:, None] - self.num_candidates(slots)).min(axis=0)
            least = np.minimum(least, room + np.maximum(self.prompt_len - self.seq_len, 0)[slots])
        return least

    def full(self, slots: Sequence[int]) -> np.ndarray:
        """Which of these slots cannot take another token, bool ``[layers, B]``."""
        limit = self.capacity[:, None] - self.num_pads[:, slots]
        full: np.ndarray = (self.rows[:, slots] >= limit) & ~self.slides[:, None]
        if self._keeps_prompts:
            full |= self.num_candidates(slots) >= self.room[:, None]
        return full

    def note_copy(self, num_bytes: int) -> None:
        """Note the size of a temporary copy."""
        self.transient_bytes = max(self.transient_bytes, num_bytes)


@attrs.frozen(eq=False)
class _ComingLead:
    """`KVCache.lead` of slots ``slots`` in layers ``layers``, -1 for slots that are empty again."""

    layers: np.ndarray
    slots: np.ndarray
    leads: Download


def _is_stack_of(layers: Sequence[LayerCache], slab: Slab) -> bool:
    """Whether layers are exactly those of one stack, and have such slabs."""
    stack = layers[0].stack
    return (
        stack.slab == slab
        and stack.num_layers == len(layers)
        and all(layer.stack is stack for layer in layers)
    )
