"""The static decode step: one new token of every sequence, in tensors at fixed addresses.

A step serves the slots ``[0, W)``. From one step to the next only the contents of tensors change:
newest tokens, row counts, positions, live slots. A step reads no value on the host, so several can
follow each other before their tokens are read. The host has a mirror of what the tensors hold,
which it advances without reading, and writes what has changed otherwise: at admissions,
compactions and departures.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.attention.choose import Attend, attention_of
from kvpolicy.attention.draw import SamplingColumns, SamplingNumbers, columns_of, draw
from kvpolicy.attention.marks import put_states
from kvpolicy.attention.operator import decode
from kvpolicy.attention.torch_backend.decode import Counts, DecodeSlabs, HeldRows, held_rows
from kvpolicy.cache.slab import KVCache, LayerCache
from kvpolicy.devices import upload

# In a mirror: what the tensor holds is not known.
_UNKNOWN = -1

_COLUMNS = tuple(field.name for field in attrs.fields(SamplingColumns))

# Stop tokens of a slot; more of them need a larger table.
_NUM_STOP_IDS = 8


@attrs.frozen
class Continuation:
    """How the sequence in a slot is continued.

    Attributes:
        max_len: Tokens it may have, prompt and generation together.
        stop_ids: Tokens that end it.
        sampling: How its tokens are drawn.
    """

    max_len: int
    stop_ids: frozenset[int]
    sampling: SamplingNumbers


class _Mirrored:
    """A tensor of numbers of the slots, and what the host knows of it.

    Attributes:
        tensor: ``[S, ...]``, int64, on the device.
        known: Its contents, `_UNKNOWN` where they are not known.
    """

    def __init__(self, device: torch.device, *size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int64, device=device)
        self.known = np.full(size, _UNKNOWN, dtype=np.int64)

    def set(self, values: np.ndarray) -> None:
        """Write the numbers of the first slots, ``[W, ...]``, unless they are there already."""
        known = self.known[: len(values)]
        if not np.array_equal(known, values):
            self.tensor[: len(values)] = upload(values, self.tensor.device)
            known[...] = values


def width_for(num_slots: int, most: int) -> int:
    """The least power of 2 that serves so many slots, or the most slots that there are."""
    return min(1 << (num_slots - 1).bit_length(), most)


class StaticStep:
    """The decode step of a cache.

    Attributes:
        cache: The KV cache.
        width: Slots that a step serves, ``W``; they may be more than take part.
        num_served: Slots that take part, the first ones.
        in_graph: Whether a step must not read anything on the host.
        token_ids: Newest token of each slot, ``[S]``, int64.
        seq_len: Tokens seen by each slot, its newest not included, ``[S]``, int64.
        live: Slots that take part, bool ``[S]``. A slot that has its last token does not.
        rows: Rows held, ``[S, layers, H_kv]``, int64; where heads share the rows of a layer, those
            of a head in the mean, see `kvpolicy.cache.segments`.
        tokens: Tokens of the steps since `begin`, ``[steps, S]``, int64.
        states: Last hidden states that no policy has observed, ``[S, N, M]``, in order; ``None``:
            they are not wanted.
        rings: For some layers, the input of their attention whose rows are not marked yet, in
            order, ``[S, N, M]``.
    """

    def __init__(
        self,
        cache: KVCache,
        max_steps: int = 1,
        states: Tensor | None = None,
        rings: Mapping[int, Tensor] | None = None,
        *,
        in_graph: bool = False,
        padded: bool = False,
    ) -> None:
        """Allocate the state of all slots.

        Args:
            cache: The KV cache.
            max_steps: The most steps whose tokens are read together.
            states: Receives last hidden states.
            rings: For some layers, receives the input of their attention.
            in_graph: Whether a step must not read anything on the host, because it is compiled;
                always so on a GPU.
            padded: Whether a step serves a power of 2 of slots, or all, so that there are few
                widths.
        """
        device = cache.layers[0].shape.device
        self.in_graph = in_graph or device.type != "cpu"
        self._padded = padded
        num_slots = self.width = self.num_served = cache.num_slots
        self.cache, self.states, self.rings = cache, states, dict(rings or {})
        num_heads = max(layer.shape.num_kv_heads for layer in cache.layers)
        self._token_ids = _Mirrored(device, num_slots)
        self._seq_len = _Mirrored(device, num_slots)
        self._observed = _Mirrored(device, num_slots)
        self._marked = _Mirrored(device, num_slots)
        self._rows = _Mirrored(device, num_slots, len(cache.layers), num_heads)
        self.token_ids, self.seq_len = self._token_ids.tensor, self._seq_len.tensor
        self.rows = self._rows.tensor
        self.live = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(max_steps, num_slots, dtype=torch.int64, device=device)
        self._num_steps = torch.zeros(1, dtype=torch.int64, device=device)
        capacity = np.where(cache.slides, cache.capacity, np.iinfo(np.int64).max)
        self._most_rows = upload(capacity, device)[:, None]
        self._slots = torch.arange(num_slots, device=device)
        self._continuations: list[Continuation] = []
        self._all_columns = SamplingColumns(
            temperature=torch.zeros(num_slots, dtype=torch.float32, device=device),
            seed=torch.zeros(num_slots, dtype=torch.int64, device=device),
            top_k=torch.zeros(num_slots, dtype=torch.int64, device=device),
            top_p=torch.ones(num_slots, dtype=torch.float64, device=device),
            min_p=torch.zeros(num_slots, dtype=torch.float32, device=device),
        )
        self._columns = SamplingColumns()
        self._stop_ids = self._no_stop_ids(_NUM_STOP_IDS)
        self._max_len = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._layers: list[LayerCache] = []
        self._arguments: list[tuple[DecodeSlabs, Counts, int]] = []
        self._tracks: list[dict[str, Tensor]] = []
        self._attention: list[Attend] = []
        self._held: list[HeldRows | None] = []

    @property
    def position_ids(self) -> Tensor:
        """Position of the new token of each slot, ``[W, 1]``."""
        return self.seq_len[: self.width, None]

    @property
    def drawn_by(self) -> tuple[str, ...]:
        """The sampling columns that the slots need: with others a step is another one."""
        return tuple(name for name in _COLUMNS if getattr(self._columns, name) is not None)

    @property
    def addresses(self) -> list[int]:
        """Where the tensors of the cache and of the slots are that may move."""
        tensors = [tensor for layer in self._layers for tensor in layer.tensors]
        return [tensor.data_ptr() for tensor in (*tensors, self._stop_ids)]

    def begin(
        self,
        token_ids: Sequence[int],
        continuations: Sequence[Continuation],
        num_observed: Sequence[int],
        num_marked: Sequence[int] = (),
    ) -> None:
        """Take over what the host knows of the first slots.

        Args:
            token_ids: Their newest tokens.
            continuations: How they are continued.
            num_observed: Tokens of each that policies have observed.
            num_marked: Tokens of each whose rows policies have marked; needed for rings only.
        """
        cache, served = self.cache, len(token_ids)
        self.num_served = served
        width = width_for(served, cache.num_slots) if self._padded else served
        self._serve(width)
        empty = [0] * (width - served)
        self._token_ids.set(np.array([*token_ids, *empty], dtype=np.int64))
        self._seq_len.set(cache.seq_len[:width])
        self._observed.set(np.array([*num_observed, *empty], dtype=np.int64))
        if self.rings:
            self._marked.set(np.array([*num_marked, *empty], dtype=np.int64))
        rows = cache.rows.T[:width, :, None]
        self._rows.set(np.broadcast_to(rows, (*rows.shape[:2], self._rows.known.shape[2])))
        if self._continuations != continuations:
            self._continue(list(continuations))
        self.live.zero_()[:served] = True
        self._num_steps.zero_()
        self._held = []

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store the new rows of a layer, and attend from them.

        Args:
            layer_idx: Decoder layer, counted from 0.
            query: Queries after RoPE, ``[W, H_q, 1, D]``.
            key: Keys of the new rows, ``[W, H_kv, 1, D]``.
            value: Values of the new rows.
            scaling: Factor on the logits.
            softcap: Logits become ``softcap * tanh(logits / softcap)``; ``None``: no cap.
            sinks: A learned logit of each query head that takes a share of the weights, ``[H_q]``.

        Returns:
            ``[W, H_q, 1, D]``.
        """
        dtype = self.cache.layers[layer_idx].shape.dtype
        query, key, value = query[:, :, 0], key[:, :, 0].to(dtype), value[:, :, 0].to(dtype)
        cap = softcap or 0.0
        if self.in_graph:
            slabs, counts, window = self._arguments[layer_idx]
            output = decode(
                query,
                key,
                value,
                slabs,
                counts,
                scaling=scaling,
                softcap=cap,
                sinks=sinks,
                sliding_window=window,
            )
        else:
            # Given in each call: functions that hold this step would keep its cache alive.
            read_rows = partial(self._held_rows, layer_idx)
            output = self._attention[layer_idx](
                query, key, value, read_rows, scaling=scaling, softcap=cap, sinks=sinks
            )
        return output[:, :, None]

    def keep_input(self, layer_idx: int, states: Tensor) -> None:
        """Keep what enters the attention of a layer, ``[W, M]``, if the layer has a ring."""
        ring = self.rings.get(layer_idx)
        if ring is not None:
            place = self.seq_len[: self.width] - self._marked.tensor[: self.width]
            put_states(ring, states, place, self.live[: self.width])

    def marked_tracks(self, layer_idx: int, names: Sequence[str]) -> tuple[list[Tensor], Counts]:
        """Tracks of a layer, ``[W, H_kv, R]``, and where their new rows are.

        Where heads share their rows: pools, ``[W, H_kv * R]``, and the places in them as rows.
        """
        slabs, counts, _ = self._arguments[layer_idx]
        tracks = [self._tracks[layer_idx][name] for name in names]
        if slabs.bounds is None:
            return tracks, counts
        capacity = slabs.keys.shape[2]
        places = slabs.bounds[:, 1:] - capacity + counts.rows.clamp(max=capacity - 1)
        pools = [track.flatten(1, 2) for track in tracks]
        return pools, attrs.evolve(counts, rows=places)

    def finish(
        self, logits: Tensor, states: Tensor | None = None, drawn: Tensor | None = None
    ) -> None:
        """Draw the next tokens, count the new rows, and stop slots that have their last token.

        Args:
            logits: Logits after the newest tokens, ``[W, V]``.
            states: Last hidden states, ``[W, 1, M]``, if wanted.
            drawn: The next tokens of the slots that take part, ``[num_served]``, if they are not
                to be drawn.
        """
        width = self.width
        live, seq_len, token_ids = (
            tensor[:width] for tensor in (self.live, self.seq_len, self.token_ids)
        )
        if drawn is None:
            drawn = draw(logits, self._columns, seq_len + 1)
        else:
            drawn = pad(drawn, (0, width - len(drawn)))
        if self.states is not None and states is not None:
            place = (seq_len - self._observed.tensor[:width]).clamp(max=self.states.shape[1] - 1)
            self.states[self._slots[:width], place] = states[:, -1]
        place = self._num_steps % len(self.tokens)
        self.tokens[:, :width].index_copy_(0, place, drawn[None])
        self._num_steps += 1
        rows, counted = self.rows[:width], live.long()
        rows.copy_(torch.minimum(rows + counted[:, None, None], self._most_rows))
        seq_len += counted
        token_ids.copy_(torch.where(live, drawn.clamp(min=0), token_ids))
        stops = (self._stop_ids[:width] == drawn[:, None]).any(dim=1) | (drawn < 0)
        live &= ~(stops | (seq_len + 1 >= self._max_len[:width]))
        if not self.in_graph:
            self._held = []

    def read(self, num_steps: int) -> list[list[int]]:
        """Tokens of the steps since `begin`, of each slot: the one wait for the device.

        After its last token a slot has tokens of no meaning.
        """
        tokens: list[list[int]] = self.tokens[:num_steps, : self.num_served].tolist()
        return tokens

    def count(
        self, num_new: Sequence[int], token_ids: Sequence[int], goes_on: Sequence[bool]
    ) -> None:
        """Advance the mirror by what the host has taken over from the steps since `begin`.

        Args:
            num_new: New tokens of each slot; fewer than there were steps if it has ended.
            token_ids: The newest token of each slot.
            goes_on: Whether its sequence goes on. The device may not know that one has ended.
        """
        cache, width = self.cache, self.num_served
        cache.count(range(width), np.array(num_new, dtype=np.int64))
        self._token_ids.known[:width] = token_ids
        self._seq_len.known[:width] = cache.seq_len[:width]
        self._rows.known[:width] = cache.rows.T[:width, :, None]
        ended = ~np.array(goes_on)
        for mirrored in (self._token_ids, self._seq_len, self._rows):
            mirrored.known[:width][ended] = _UNKNOWN

    def _continue(self, continuations: list[Continuation]) -> None:
        """Write how the sequences are continued."""
        self._continuations, width = continuations, len(continuations)
        most = max(len(one.stop_ids) for one in continuations)
        if most > self._stop_ids.shape[1]:
            self._stop_ids = self._no_stop_ids(most)
        stop_ids = np.full((width, self._stop_ids.shape[1]), _UNKNOWN, dtype=np.int64)
        for row, one in zip(stop_ids, continuations, strict=True):
            row[: len(one.stop_ids)] = list(one.stop_ids)
        device = self.live.device
        self._stop_ids[:width] = upload(stop_ids, device)
        self._max_len[:width] = upload(np.array([one.max_len for one in continuations]), device)
        columns = columns_of([one.sampling for one in continuations], device)
        for name in _COLUMNS:
            if (new := getattr(columns, name)) is not None:
                getattr(self._all_columns, name)[:width] = new
        self._columns = columns
        self._cut_columns()

    def _no_stop_ids(self, most: int) -> Tensor:
        size = (self.cache.num_slots, most)
        return torch.full(size, _UNKNOWN, dtype=torch.int64, device=self.live.device)

    def _cut_columns(self) -> None:
        """Let the columns that are needed be those of the slots served, where they always are."""
        self._columns = SamplingColumns(
            *(
                None
                if getattr(self._columns, name) is None
                else getattr(self._all_columns, name)[: self.width]
                for name in _COLUMNS
            )
        )

    @contextmanager
    def idle(self, width: int) -> Iterator[None]:
        """Serve so many slots in a ``with`` block, none of which takes part.

        Steps in the block store, count and draw nothing that is read.
        """
        before, live = self.width, self.live.clone()
        num_steps = self._num_steps.clone()
        self._serve(width)
        self.live.zero_()
        try:
            yield
        finally:
            self._serve(before)
            self.live.copy_(live)
            self._num_steps.copy_(num_steps)

    def _serve(self, width: int) -> None:
        """Take the first slots of all tensors that a step is given."""
        layers = self.cache.layers
        if width == self.width and self._layers and all(map(is_, layers, self._layers)):
            return
        self.width, self._layers = width, list(layers)
        self._arguments = [self._arguments_of(index) for index in range(len(layers))]
        self._tracks = [
            {name: track[:width] for name, track in layer.tracks.items()} for layer in layers
        ]
        if not self.in_graph:
            self._attention = [attention_of(*arguments) for arguments in self._arguments]
        self._cut_columns()

    def _arguments_of(self, layer_idx: int) -> tuple[DecodeSlabs, Counts, int]:
        """What attention in a layer reads and changes, and its sliding window or 0."""
        layer, served = self.cache.layers[layer_idx], slice(self.width)
        tracks = {name: track[served] for name, track in layer.tracks.items()}
        accumulated = [tracks.pop(name) for name in layer.accumulators]
        slabs = DecodeSlabs(
            layer.keys[served],
            layer.values[served],
            layer.positions[served],
            list(tracks.values()),
            accumulated,
            layer.accumulators,
            None if layer.window is None else layer.window[served],
            None if layer.bounds is None else layer.bounds[served],
        )
        rows = self.rows[served, layer_idx, : layer.shape.num_kv_heads]
        counts = Counts(rows, self.seq_len[served], self.live[served])
        return slabs, counts, layer.shape.sliding_window or 0

    def _held_rows(self, layer_idx: int) -> HeldRows | None:
        """The rows of a layer, read once in a step for all layers."""
        self._held = self._held or self._read_rows()
        return self._held[layer_idx]

    def _read_rows(self) -> list[HeldRows | None]:
        """The rows of each layer; layers that hold equally many share what was read."""
        known: dict[tuple[object, ...], HeldRows] = {}
        held: list[HeldRows | None] = []
        rows = self.rows[: self.width].numpy()
        for layer_idx, layer in enumerate(self.cache.layers):
            if layer.shape.sliding_window is not None:
                held.append(None)
                continue
            capacity, num_heads = layer.slab.capacity, layer.shape.num_kv_heads
            of_layer = rows[:, layer_idx, :num_heads]
            bounds = None if layer.bounds is None else layer.bounds[: self.width]
            own = () if bounds is None else tuple(bounds.flatten().tolist())
            key = (of_layer.tobytes(), capacity, own)
            if key not in known:
                counts = torch.from_numpy(of_layer)
                known[key] = held_rows(counts, self.live[: self.width], capacity, bounds)
            held.append(known[key])
        return held
