"""Even slabs: every KV head of a slot holds equally many rows, which are the first of its slab."""

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.attention.base import Compact
from kvpolicy.attention.choose import backend_for
from kvpolicy.attention.visible import Visible
from kvpolicy.cache.arena import SlabArena, slot_index
from kvpolicy.cache.contents import LayerContents
from kvpolicy.cache.layouts.base import LayerCache, OpenRows, OpenSlabs, RowLayout
from kvpolicy.cache.layouts.places import Places, new_places
from kvpolicy.cache.layouts.span import Columns, Entries, Kept, Span, row_index, taken
from kvpolicy.cache.layouts.tokens import NewTokens
from kvpolicy.devices import upload

# Makes the kept rows of a slab the first of their entries. Those behind them receive a number, if
# one is given. Returns the bytes of the copy that it has made.
_Move = Callable[[Tensor, int | None], int]


class Even(RowLayout):
    """Slabs ``[S, H_kv, capacity]`` whose first rows hold tokens, in order of position."""

    def all_rows(self, layer: LayerCache, layers: Sequence[int], slots: Sequence[int]) -> Span:
        """The first rows of the slabs."""
        num_rows = int(self.counts.rows[layers[0], slots[0]])
        return EvenSpan(self.entries(layer, layers, slots), num_rows)

    def open(self, layer: LayerCache, tokens: NewTokens) -> OpenRows:
        """Begin a forward."""
        return OpenEven(layer, tokens, self.counts.rows[layer.index, tokens.slots])

    def columns(self, layer: LayerCache, slots: Sequence[int]) -> Columns:
        """The first rows of the slabs, a view if slots are in equal steps."""
        rows = self.counts.rows[layer.index, list(slots)]
        num_rows = int(rows.max())
        held = (slot_index(slots), slice(None), slice(num_rows))
        present = upload(np.arange(num_rows) < rows[:, None], layer.shape.device)[:, None]
        return Columns(lambda slab: slab[held], present)

    def place(self, layer: LayerCache, slot: int, held: LayerContents) -> Span:
        """The first rows of the slot."""
        return EvenSpan(self.entries(layer, [layer.index], [slot]), held.num_rows)


class EvenSpan(Span):
    """Equally many rows of each entry and head, from one row of the slabs on."""

    def __init__(self, entries: Entries, num_rows: int, first: int = 0) -> None:
        """Take entries, and the rows of each."""
        self.entries, self.num_rows, self.first = entries, num_rows, first

    def part(self, first: int, end: int) -> Span:
        """Some of these rows."""
        return EvenSpan(self.entries, end - first, self.first + first)

    def read(self, slab: Tensor) -> Tensor:
        """These rows; a view if the entries are in equal steps."""
        return self.entries.of(slab[:, :, self.first : self.first + self.num_rows])

    def write(self, slab: Tensor, rows: Tensor) -> None:
        """Replace these rows."""
        self.put(slab, 0, rows)

    def keep(
        self,
        arena: SlabArena,
        keep: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        budget: int | None,
    ) -> Kept:
        """Make the chosen rows the first of these, in place; ``keep`` is ``[B, H_kv, K]``."""
        # An index that is wrong, which may be known only later, must not reach other slots.
        within = keep.clamp(0, self.num_rows - 1)
        compact = backend_for(keep.device, arena.shape.dtype).compact
        if compact is None:
            move = self._by_copy(self.row_index(within, arena.positions))
        else:
            move = self._in_place(within, compact)
        store, most = arena.store, 0
        for stored, replacement in ((store.keys, keys), (store.values, values)):
            if replacement is None:
                most = max(most, move(stored.slab, None))
            else:
                rows = stored.encode(replacement)
                self.put(stored.slab, 0, rows)
                most = max(most, rows.nbytes)
        most = max(most, move(arena.positions, -1))
        for track in arena.tracks.values():
            most = max(most, move(track, 0))
        return Kept(keep.shape[2], most)

    def put(self, slab: Tensor, start: int, rows: Tensor | int) -> None:
        """Write some of these rows of a slab: those from ``start`` on, or a number to the last."""
        end = self.num_rows if isinstance(rows, int) else start + rows.shape[2]
        slab[self.entries.index, :, self.first + start : self.first + end] = rows

    @property
    def starts(self) -> Tensor | None:
        """First row of each entry, ``[B]``, for kernels; ``None``: the first of its slab."""
        return torch.full_like(self.entries.places, self.first) if self.first else None

    def row_index(self, keep: Tensor, slab: Tensor) -> Tensor:
        """Places of rows among those of all entries and heads of a slab, ``[B, H_kv, K]``."""
        starts = self.starts
        rows = keep if starts is None else keep + starts[:, None, None]
        return row_index(self.entries.places, rows, slab)

    def _in_place(self, keep: Tensor, compact: Compact) -> _Move:
        """Moves rows within their slab."""
        places, starts = self.entries.places, self.starts
        num_kept = keep.new_full(keep.shape[:2], keep.shape[2])
        num_rows = torch.full_like(num_kept, self.num_rows)

        def move(slab: Tensor, empty: int | None) -> int:
            compact(slab, keep, places, num_kept, num_rows, empty or 0, start=starts)
            return 0

        return move

    def _by_copy(self, index: Tensor) -> _Move:
        """Moves rows by way of a copy."""

        def move(slab: Tensor, empty: int | None) -> int:
            rows = taken(slab, index)
            self.put(slab, 0, rows)
            if empty is not None:
                self.put(slab, rows.shape[2], empty)
            return rows.nbytes

        return move


@attrs.frozen(eq=False)
class Where:
    """Where the new rows of a forward go in layers that hold equally many.

    Attributes:
        places: Places of the new tokens in the slabs.
        num_rows: Rows to attend to: those of the fullest slot.
        visible: Which of them each query sees.
    """

    places: Places
    num_rows: int
    visible: Visible


def where_rows_go(
    tokens: NewTokens, before: np.ndarray, device: torch.device, reach: int | None = None
) -> Where:
    """Where new rows go behind those that slots hold; computed once for layers that hold the same.

    Args:
        tokens: The new tokens.
        before: Rows that the slots hold, ``[B]``.
        device: The device of the layer.
        reach: How many rows a query sees, its own included; ``None``: all.
    """
    key = (device, before.tobytes(), reach)
    return tokens.shared(key, lambda: _where(tokens, before, device, reach))


def _where(tokens: NewTokens, before: np.ndarray, device: torch.device, reach: int | None) -> Where:
    places = new_places(tokens, tokens.slots, before, device)
    return Where(
        places, int((before + tokens.lengths).max()), causal(tokens, before, device, reach)
    )


def causal(
    tokens: NewTokens, before: np.ndarray, device: torch.device, reach: int | None = None
) -> Visible:
    """What new tokens see of rows in their order; arguments are those of `where_rows_go`."""
    after = before + tokens.lengths
    return Visible(tokens.lengths, after, tokens.width, device, reach, ahead=tokens.ahead)


def add_to(track: Tensor, held: tuple[slice | Tensor, slice, slice], received: Tensor) -> None:
    """Add to the numbers of some rows of a track; ``held`` names no entry twice."""
    if isinstance(held[0], slice):
        track[held].add_(received)  # in one kernel: `+=` would write the sums once more
    else:
        track[held] += received


class OpenEven(OpenSlabs):
    """New rows in the first free places of the slabs; what is read is a view if it can be."""

    repeats = True

    def __init__(
        self, layer: LayerCache, tokens: NewTokens, before: np.ndarray, reach: int | None = None
    ) -> None:
        """Begin a forward of slots that hold so many rows, ``[B]``; see `where_rows_go`."""
        super().__init__(layer, tokens)
        device = layer.shape.device
        where = where_rows_go(tokens, before, device, reach)
        self.visible, self._places = where.visible, where.places
        self._held = (tokens.served_on(device), slice(None), slice(where.num_rows))

    def put(self, slab: Tensor, new: Tensor | int) -> None:
        """Write the new rows of a slab, or a number."""
        self._places.put(slab, new)

    def put_each(self, slab: Tensor, new: Tensor) -> None:
        """Write the new rows of a slab, without pads."""
        self._places.put_each(slab, new)

    def read(self, slab: Tensor) -> Tensor:
        """The first rows of a slab; a view if slots are in equal steps."""
        return slab[self._held]

    def add(self, track: Tensor, received: Tensor) -> None:
        """Add to the first numbers of a track."""
        add_to(track, self._held, received)
