"""The interface of a layout: how a layer of a cache holds what it remembers of each slot.

A layout is an object for some layers of a cache that are alike in kind. It says which rows of the
slabs a head holds, what hooks see of them, how many are free and where the next one goes, what an
eager forward attends to, and what is moved with a slot. Which layout a layer gets is decided in one
place, `kvpolicy.cache.layouts.compose`. Nothing else names one.

The order of calls for a layer with rows: `Layout.room` before a forward; `RowLayout.open` in it,
see `OpenRows`; `Layout.count` when its rows are facts; `RowLayout.rows` at a compaction, see
`Span`. Layers that hold no rows implement `Layout` only. States of fixed size, which layers may
have beside rows or instead, are `kvpolicy.cache.layouts.states`.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import setitem
from typing import Any

import numpy as np
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.softmax import PLAIN
from kvpolicy.attention.visible import Visible
from kvpolicy.cache.arena import Arena, SlabArena, slot_index
from kvpolicy.cache.contents import LayerContents
from kvpolicy.cache.counts import Counts
from kvpolicy.cache.layouts.span import Columns, Entries, Span
from kvpolicy.cache.layouts.tokens import NewTokens
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.features import feature

#: Tokens that a slot takes where nothing is ever due.
PLENTY = sys.maxsize

ALL = slice(None)


class Layer:
    """One layer of a cache.

    Attributes:
        index: Its number, counted from 0.
        arena: What this layer and others of its kind hold.
        first: Place of its first slot in the arena.
        shape: Its shape.
        slab: What it stores for a slot.
        softmax: The softmax that the layer used in its last forward.
        tensors: Everything that belongs to this layer; the first axis is always the slot.
    """

    def __init__(self, index: int, arena: Arena, place: int) -> None:
        """The layer at a place of an arena."""
        self.index, self.arena, self.first = index, arena, place * arena.num_slots
        self.shape, self.slab = arena.shape, arena.slab
        self.softmax = PLAIN
        self.slots = slice(self.first, self.first + arena.num_slots)
        self.tensors = [tensor[self.slots] for tensor in arena.tensors]

    @property
    def slides(self) -> bool:
        """Whether slabs hold a whole sliding window.

        Then the oldest row leaves when a token comes to a full one, and a slot takes any number of
        tokens without a compaction.
        """
        return self.slab.capacity == self.shape.sliding_window

    @property
    def static_problem(self) -> str | None:
        """Why static steps cannot serve it: their kernels read slabs; ``None``: they can."""
        return "holds no rows"

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of a row, in all heads, as they are stored."""
        return 0

    @property
    def exact_bytes(self) -> int:
        """Bytes of a slot's exact copies of its newest rows."""
        return 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for this layer."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Layout(ABC):
    """How some layers of a cache hold what they remember of each slot, with rows or without.

    Attributes:
        layers: Their numbers.
        own: The same as an index into the numbers of all layers.
    """

    layers: list[int]
    own: slice | list[int]

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def attach(self, layers: Sequence[Any]) -> None:
        """Take its layers, in order, as they are now: they may have grown."""
        self.layers = [layer.index for layer in layers]
        self.own = slot_index(self.layers)

    # Memory

    def fit(self, shape: LayerShape, slab: Slab) -> Slab:
        """What a layer stores for a slot, given what is wanted of it."""
        del shape
        return slab

    @abstractmethod
    def new_arena(self, shape: LayerShape, slab: Slab, num_layers: int, num_slots: int) -> Arena:
        """Allocate memory for layers of a shape."""

    @abstractmethod
    def new_layer(self, index: int, arena: Arena, place: int) -> Layer:
        """The layer at a place of an arena that `new_arena` has made."""

    def widen(self, old: Layer, new: Layer) -> None:
        """Copy all that a layer holds to a larger one."""
        raise NotImplementedError

    # Counts

    def admits(self, num_prompt: int) -> bool:
        """Whether a sequence with so many prompt tokens may be given a free slot now."""
        del num_prompt
        return True

    def enter_together(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether one forward may bring in so many prompt tokens of each of these slots.

        That of one slot always may, as many as it has `room` for.
        """
        del slots, lengths
        return True

    def reserve(self, tokens: NewTokens) -> object:
        """Take the memory beside their slots that a forward of new tokens needs.

        Returns:
            Which it is: forwards alike otherwise store their rows in other places if it differs.
        """
        del tokens
        return None

    @abstractmethod
    def room(self, slots: Sequence[int]) -> np.ndarray:
        """Tokens that these slots take in these layers before one is due, ``[n, B]``."""

    @abstractmethod
    def full(self, slots: Sequence[int]) -> np.ndarray:
        """Which of these slots cannot take another token, bool ``[n, B]``."""

    def count(self, slots: np.ndarray, num_new: int | np.ndarray, num_left: np.ndarray) -> None:
        """Follow new tokens of some slots, which are not in `Counts.seq_len` yet.

        Args:
            slots: The slots, ``[B]``.
            num_new: Their new tokens.
            num_left: Rows that have left for them, ``[layers, B]``, of all layers of the cache.
        """
        del slots, num_new, num_left

    # What happens to a slot

    @property
    def numbers(self) -> list[np.ndarray]:
        """What the layout itself knows of the slots; the last axis is the slot."""
        return []

    @abstractmethod
    def copy(self, layer: Layer, slot: int, newest: int | None, without: int) -> LayerContents:
        """A copy of what a slot holds.

        Args:
            layer: The layer.
            slot: The slot.
            newest: How many of its newest rows to copy; ``None``: all. See `copy_slot`.
            without: How many of its newest tokens to leave out.
        """

    @abstractmethod
    def fill(self, layer: Layer, slot: int, contents: LayerContents) -> None:
        """Have an empty slot hold a copy of some contents."""

    def clear(self, slot: int) -> None:
        """Forget a slot, whose memory and counts are empty again."""
        for array in self.numbers:
            array[..., slot] = 0

    def move(self, source: int, target: int) -> None:
        """Follow a sequence to another slot."""
        for array in self.numbers:
            array[..., target] = array[..., source]

    def swap(self, first: int, second: int) -> None:
        """Follow two sequences that are exchanged."""
        for array in self.numbers:
            array[..., [first, second]] = array[..., [second, first]]

    def take(self, source: "Layout", slots: Sequence[int]) -> None:
        """Take over what another cache, or this one, knows of its slots."""
        for array, other in zip(self.numbers, source.numbers, strict=True):
            array[...] = other[..., list(slots)]


class RowLayout(Layout):
    """How layers hold rows, of which slots have ``capacity`` in each head."""

    # Whether rows may leave without a compaction because no later query sees them.
    drops_unseen = False

    _firsts: dict[int, int]  # place in its arena of the first slot of each layer

    def attach(self, layers: Sequence["LayerCache"]) -> None:
        """Take its layers as they are now."""
        super().attach(layers)
        self._firsts = {layer.index: layer.first for layer in layers}

    def entries(
        self, layer: "LayerCache", layers: Sequence[int], slots: Sequence[int]
    ) -> "Entries":
        """Slots, each in a layer of the arena of ``layer``, as entries of a batch."""
        firsts = self._firsts
        places = [firsts[one] + slot for one, slot in zip(layers, slots, strict=True)]
        return Entries(slot_index(places), layer.shape.device, self.counts.seq_len[list(slots)])

    def new_arena(self, shape: LayerShape, slab: Slab, num_layers: int, num_slots: int) -> Arena:
        """Allocate slabs."""
        return SlabArena(shape, slab, num_layers, num_slots, self.empty_tables(shape, slab))

    def new_layer(self, index: int, arena: Arena, place: int) -> "LayerCache":
        """The slabs of a layer."""
        assert isinstance(arena, SlabArena)
        return LayerCache(index, arena, place, self)

    def empty_tables(self, shape: LayerShape, slab: Slab) -> dict[str, Tensor]:
        """Tensors by name that each slot has beside its rows, as they are in an empty slot."""
        del shape, slab
        return {}

    def widen(self, old: Layer, new: Layer) -> None:
        """Copy the rows of a layer to larger slabs."""
        assert isinstance(old, LayerCache)
        assert isinstance(new, LayerCache)
        if new.window is not None and old.window is not None:
            new.window[:, :, : old.window.shape[2]] = old.window
        for name, ring in new.store.exact.items():
            ring[:] = old.store.exact[name]
        self.widen_rows(old, new)

    def widen_rows(self, old: "LayerCache", new: "LayerCache") -> None:
        """Copy rows to larger slabs; tables are those of an empty slot yet."""
        for before, after in zip(old.slabs, new.slabs, strict=True):
            after[:, :, : before.shape[2]] = before

    # Counts

    def room(self, slots: Sequence[int]) -> np.ndarray:
        """Tokens that these slots take in these layers before one is due, ``[n, B]``."""
        counts, own, index = self.counts, self.own, slot_index(slots)
        limit = counts.capacity[own][:, None] - counts.num_reserved[own][:, index]
        free: np.ndarray = limit - counts.rows[own][:, index]
        return free

    def full(self, slots: Sequence[int]) -> np.ndarray:
        """Which of these slots cannot take another token, bool ``[n, B]``."""
        return self.room(slots) <= 0

    def fullest(self, layers: int | np.ndarray, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Rows of the fullest KV head of some slots, each in its layer or all in one, ``[B]``."""
        most: np.ndarray = self.counts.rows[layers, np.asarray(slots)]
        return most

    def num_staying(self, slots: Sequence[int]) -> np.ndarray:
        """Tokens at the beginning of these slots whose rows no compaction chooses from, ``[B]``."""
        return np.zeros(len(slots), dtype=np.int64)

    # Rows

    @abstractmethod
    def all_rows(self, layer: "LayerCache", layers: Sequence[int], slots: Sequence[int]) -> Span:
        """The rows that some slots hold, each in a layer of one arena, equally many of each."""

    def rows(self, layer: "LayerCache", layers: Sequence[int], slots: Sequence[int]) -> Span:
        """Those of `all_rows` that hooks see, and that a compaction chooses from."""
        return self.all_rows(layer, layers, slots)

    def out_of_sight(
        self, shape: LayerShape, positions: Tensor, seq_len: np.ndarray
    ) -> Tensor | None:
        """Which rows at some positions no later query sees, bool; ``None``: there is none.

        Args:
            shape: The shape of the layer.
            positions: ``[B, H_kv, T]``.
            seq_len: Tokens seen by the sequences, ``[B]``.
        """
        del shape, positions, seq_len
        return None

    def sees(
        self, shape: LayerShape, positions: Tensor, tokens: NewTokens, now: slice = ALL
    ) -> Tensor:
        """Which rows at some positions are not hidden from new tokens, though they come before.

        Args:
            shape: The shape of the layer.
            positions: ``[B, H_kv, T]``.
            tokens: The new tokens.
            now: Token columns that are asked for, ``l`` of them.

        Returns:
            Bool ``[B, H_kv, l, T]``. Asked only where `drops_unseen`.
        """
        raise NotImplementedError

    def drop_unseen(self, layer: "LayerCache", slot: int, num_hidden: int) -> None:
        """Drop the first rows of a slot that no later query sees.

        Args:
            layer: The layer.
            slot: The slot.
            num_hidden: Of the rows that hooks see, how many are out of sight in all heads.
        """
        raise NotImplementedError

    @abstractmethod
    def open(self, layer: "LayerCache", tokens: NewTokens) -> "OpenRows":
        """Begin a forward."""

    @abstractmethod
    def columns(self, layer: "LayerCache", slots: Sequence[int]) -> Columns:
        """The rows of slots that may hold different numbers of them."""

    @abstractmethod
    def place(self, layer: "LayerCache", slot: int, held: LayerContents) -> Span:
        """Give an empty slot places for all rows of some contents."""

    def copy(self, layer: Layer, slot: int, newest: int | None, without: int) -> LayerContents:
        """A copy of the rows of a slot."""
        assert isinstance(layer, LayerCache)
        counts, arena, place = self.counts, layer.arena, (layer.index, slot)
        num_rows = int(counts.rows[place]) - without
        held = layer.rows_of(slot)
        every = held.part(0, held.num_rows - without)
        chosen = every if newest is None else every.part(every.num_rows - newest, every.num_rows)
        keys, values = (chosen.read(slab) for slab in arena.store.slabs)
        seq_len = int(counts.seq_len[slot]) - without
        return LayerContents(
            keys[0].clone(),
            values[0].clone(),
            chosen.read(arena.positions)[0].clone(),
            {
                # Those of older rows have changed, too.
                name: (every if name in layer.accumulators else chosen).read(track)[0].clone()
                for name, track in arena.tracks.items()
            },
            None if layer.window is None else layer.window[slot, :, :seq_len].clone(),
            int(counts.compacted_at[place]),
            min(int(counts.prompt_rows[place]), num_rows),
            num_rows,
            exact={
                name: ring[slot, :, :seq_len].clone() for name, ring in layer.store.exact.items()
            },
        )

    def fill(self, layer: Layer, slot: int, contents: LayerContents) -> None:
        """Have an empty slot hold a copy of some rows."""
        assert isinstance(layer, LayerCache)
        place, counts, arena = (layer.index, slot), self.counts, layer.arena
        counts.rows[place] = contents.rows
        counts.compacted_at[place] = contents.compacted_at
        counts.prompt_rows[place] = contents.prompt_rows
        span = self.place(layer, slot, contents)
        for slab, rows in (
            *zip(arena.store.slabs, (contents.keys, contents.values), strict=True),
            (arena.positions, contents.positions),
            *((track, contents.tracks[name]) for name, track in arena.tracks.items()),
        ):
            span.write(slab, rows[None])
        if layer.window is not None:
            assert contents.window is not None
            layer.window[slot, :, : contents.window.shape[1]] = contents.window
        for name, rows in contents.exact.items():
            layer.store.exact[name][slot, :, : rows.shape[1]] = rows


class Around(RowLayout):
    """A layout around another one, which it changes in some respect: the base of such layouts."""

    def __init__(self, inner: RowLayout) -> None:
        super().__init__(inner.counts)
        self.inner = inner
        self.drops_unseen = inner.drops_unseen

    def attach(self, layers: Sequence["LayerCache"]) -> None:
        """Take its layers as they are now."""
        super().attach(layers)
        self.inner.attach(layers)

    def fit(self, shape: LayerShape, slab: Slab) -> Slab:
        """What a layer stores for a slot."""
        return self.inner.fit(shape, slab)

    def widen_rows(self, old: "LayerCache", new: "LayerCache") -> None:
        """Copy rows to larger slabs."""
        self.inner.widen_rows(old, new)

    def empty_tables(self, shape: LayerShape, slab: Slab) -> dict[str, Tensor]:
        """Tensors that each slot has beside its rows."""
        return self.inner.empty_tables(shape, slab)

    def admits(self, num_prompt: int) -> bool:
        """Whether a sequence may be given a free slot now."""
        return self.inner.admits(num_prompt)

    def enter_together(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether one forward may bring in so many prompt tokens."""
        return self.inner.enter_together(slots, lengths)

    def reserve(self, tokens: NewTokens) -> object:
        """Take the memory beside their slots that new tokens need."""
        return self.inner.reserve(tokens)

    def room(self, slots: Sequence[int]) -> np.ndarray:
        """Tokens that these slots take, ``[n, B]``."""
        return self.inner.room(slots)

    def full(self, slots: Sequence[int]) -> np.ndarray:
        """Which of these slots cannot take another token, bool ``[n, B]``."""
        return self.inner.full(slots)

    def fullest(self, layers: int | np.ndarray, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Rows of the fullest KV head, ``[B]``."""
        return self.inner.fullest(layers, slots)

    def count(self, slots: np.ndarray, num_new: int | np.ndarray, num_left: np.ndarray) -> None:
        """Follow new tokens."""
        self.inner.count(slots, num_new, num_left)

    @property
    def numbers(self) -> list[np.ndarray]:
        """What the layout knows of the slots."""
        return self.inner.numbers

    def all_rows(self, layer: "LayerCache", layers: Sequence[int], slots: Sequence[int]) -> Span:
        """The rows that some slots hold."""
        return self.inner.all_rows(layer, layers, slots)

    def out_of_sight(
        self, shape: LayerShape, positions: Tensor, seq_len: np.ndarray
    ) -> Tensor | None:
        """Which rows no later query sees."""
        return self.inner.out_of_sight(shape, positions, seq_len)

    def sees(
        self, shape: LayerShape, positions: Tensor, tokens: NewTokens, now: slice = ALL
    ) -> Tensor:
        """Which rows are not hidden from new tokens."""
        return self.inner.sees(shape, positions, tokens, now)

    def drop_unseen(self, layer: "LayerCache", slot: int, num_hidden: int) -> None:
        """Drop the first rows that no later query sees."""
        self.inner.drop_unseen(layer, slot, num_hidden)

    def open(self, layer: "LayerCache", tokens: NewTokens) -> "OpenRows":
        """Begin a forward."""
        return self.inner.open(layer, tokens)

    def columns(self, layer: "LayerCache", slots: Sequence[int]) -> Columns:
        """The rows of slots that may hold different numbers of them."""
        return self.inner.columns(layer, slots)

    def place(self, layer: "LayerCache", slot: int, held: LayerContents) -> Span:
        """Places for all rows of some contents."""
        return self.inner.place(layer, slot, held)


class LayerCache(Layer):
    """The slabs of one layer, which are views of those of its arena.

    Attributes:
        layout: How slots hold their rows in it.
        store: Keys and values of its rows.
        positions: Position of each row's token in its sequence, ``[S, H_kv, capacity]``.
        tracks: Per-row numbers by name, ``[S, H_kv, capacity]``.
        accumulators: Names of the tracks that attention updates.
        window: The last queries after RoPE, ``[S, H_q, W, D]``, or ``None``; see `SlabArena`.
        bounds: Where a slot's rows are divided among its heads, the bounds of their segments,
            ``[S, H_kv + 1]``; ``None``: every head has a slab. For kernels that read slabs.
    """

    arena: SlabArena

    def __init__(self, index: int, arena: SlabArena, place: int, layout: RowLayout) -> None:
        """The layer at a place of an arena."""
        super().__init__(index, arena, place)
        self.layout = layout
        self.store = arena.store.of_slots(self.slots)
        self.positions = arena.positions[self.slots]
        self.tracks = {name: track[self.slots] for name, track in arena.tracks.items()}
        self.accumulators = [name for name in ACCUMULATORS if name in self.tracks]
        self.window = None if arena.window is None else arena.window[self.slots]
        bounds = arena.tables.get("bounds")
        self.bounds = None if bounds is None else bounds[self.slots]
        self._around: Callable[[OpenRows], OpenRows] | None = None
        if self.store.exact:
            self._around = feature(
                "kvpolicy.cache.exact_rows", "OpenExact", "rows in 4 bits whose newest are exact"
            )

    @property
    def static_problem(self) -> str | None:
        """Why static steps cannot serve it."""
        return None

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of a row, in all heads, as they are stored."""
        return sum(slab[0, :, :1].nbytes for slab in self.store.slabs)

    @property
    def exact_bytes(self) -> int:
        """Bytes of a slot's exact copies of its newest rows."""
        return sum(ring[0].nbytes for ring in self.store.exact.values())

    @property
    def keys(self) -> Tensor:
        """Keys after RoPE, ``[S, H_kv, capacity, D]``."""
        return self.store.keys.decode(self.store.keys.slab)

    @property
    def values(self) -> Tensor:
        """Values, ``[S, H_kv, capacity, D]``."""
        return self.store.values.decode(self.store.values.slab)

    @property
    def slabs(self) -> list[Tensor]:
        """What has a place for every row, as it is stored; the first axis is always the slot."""
        return [*self.store.slabs, self.positions, *self.tracks.values()]

    def open(self, tokens: NewTokens) -> "OpenRows":
        """Begin a forward."""
        opened = self.layout.open(self, tokens)
        return opened if self._around is None else self._around(opened)

    def rows_of(self, slot: int) -> Span:
        """All rows that a slot holds, as one entry."""
        return self.layout.all_rows(self, [self.index], [slot])

    def held(self, slot: int, slab: Tensor) -> list[Tensor]:
        """The rows of each KV head of a slot in one of the slabs of the arena."""
        span = self.rows_of(slot)
        rows = span.read(slab)[0]
        if span.absent is None:
            return list(rows)
        return [one[~absent] for one, absent in zip(rows, span.absent[0], strict=True)]


class OpenRows(ABC):
    """A layer with rows during one eager forward.

    What is done to it is provisional: its new rows are in free places that nobody counts, or beside
    the slab, and all else waits for `commit`. A forward that fails is ended by `discard`; one that
    is ended by neither has changed nothing that a count reaches.

    Attributes:
        visible: Which rows each query sees of those that `store` returned; once they are stored.
            Those of `held` come before them.
        held: More rows to attend to, keys and values ``[B, H_kv, T, D]``, if those that `store`
            returned are beside the slabs; else ``None``.
        remembers: Whether queries are wanted, see `remember`.
        repeats: Whether as many new tokens over as many rows do the same to the same tensors,
            whatever their positions: what depends on these is in tensors of `NewTokens`, and a
            commit changes nothing but tensors.
    """

    repeats = False

    visible: Visible
    held: tuple[Tensor, Tensor] | None = None

    def __init__(self, layer: LayerCache, tokens: NewTokens) -> None:
        self.layer, self.tokens = layer, tokens
        self.remembers = layer.window is not None
        self._at_commit: list[Callable[[], None]] = []

    @abstractmethod
    def store(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new rows, ``[B, H_kv, L, D]``; return all to attend to, ``[B, H_kv, T, D]``."""

    @property
    def positions(self) -> Tensor:
        """Positions of the rows that `store` returned, ``[B, H_kv, T]``; -1 where there is none.

        Asked only of what a layout has opened, once rows are stored.
        """
        raise NotImplementedError

    @abstractmethod
    def receive(self, name: str, received: Tensor) -> None:
        """Note what rows have received, ``[B, H_kv, T]``, for the accumulator of that name.

        Of every layer that attends to them; it adds up.
        """

    @abstractmethod
    def annotate(self, name: str, numbers: Tensor) -> None:
        """Note numbers of the new rows, ``[N, H_kv]``, for a track of that name."""

    def remember(self, queries: Tensor, reader: int = 0) -> None:
        """Note queries, ``[B, H_q, L, D]``, if the layer has a ring for the newest.

        Args:
            queries: Those of one layer that attends to these rows.
            reader: Which one, see `LayerShape.reader`.
        """
        ring = self.layer.window
        if ring is not None:
            sequences, columns, slots, places = self.tokens.newest(ring.shape[2], ring.device)
            own = self.layer.shape.heads_of(reader, ring)
            newest = queries[sequences, :, columns].unflatten(1, own.shape[1:3])
            index = (slots, ALL, ALL, places)
            self._at_commit.append(partial(setitem, own, index, newest))

    def commit(self) -> None:
        """Make what has been noted part of the slots; the cache counts the rows."""
        waiting, self._at_commit = self._at_commit, []
        for change in waiting:
            change()

    def discard(self) -> None:
        """Forget the new rows."""
        self._at_commit = []


class OpenSlabs(OpenRows):
    """A layer during a forward whose new rows are in free places of its slabs."""

    @abstractmethod
    def put(self, slab: Tensor, new: Tensor | int) -> None:
        """Write the new rows of a slab, ``[B, H_kv or 1, L, ...]``, or a number."""

    @abstractmethod
    def put_each(self, slab: Tensor, new: Tensor) -> None:
        """Write the new rows of a slab, ``[N, H_kv, ...]`` without pads."""

    @abstractmethod
    def read(self, slab: Tensor) -> Tensor:
        """The rows of a slab to attend to, ``[B, H_kv, T, ...]``."""

    @abstractmethod
    def add(self, track: Tensor, received: Tensor) -> None:
        """Add numbers ``[B, H_kv, T]`` to a track of the rows attended to."""

    def store(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new rows behind those held."""
        store, tokens = self.layer.store, self.tokens
        for stored, new in ((store.keys, keys), (store.values, values)):
            self.put(stored.slab, stored.encode(new))
        self.put(self.layer.positions, tokens.positions_on(self.layer.shape.device))
        rows = store.read(self.read)
        if not store.is_plain:
            self.layer.layout.counts.note_copy(sum(one.nbytes for one in rows))
        return rows

    @property
    def positions(self) -> Tensor:
        """Positions of the rows attended to."""
        return self.read(self.layer.positions)

    def receive(self, name: str, received: Tensor) -> None:
        """Note what the rows attended to have received."""
        self._at_commit.append(partial(self.add, self.layer.tracks[name], received))

    def annotate(self, name: str, numbers: Tensor) -> None:
        """Note numbers of the new rows."""
        track = self.layer.tracks[name]
        self._at_commit.append(partial(self.put_each, track, numbers.to(track.dtype)))

    def discard(self) -> None:
        """Empty the places of the new rows."""
        super().discard()
        for slab in self.layer.store.slabs:
            self.put(slab, 0)
        self.put(self.layer.positions, -1)
