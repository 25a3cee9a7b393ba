"""The static decode step: one new token of every sequence, in tensors at fixed addresses.

A step serves the slots ``[0, W)``. From one step to the next only the contents of tensors change:
newest tokens, row counts, positions, live slots. A step reads no value on the host, so several can
follow each other before their tokens are read. The host has a mirror of what the tensors hold,
which it advances without reading, and writes what has changed otherwise: at admissions,
compactions and departures.

The tokens of two steps have a place: those of one are read while the next, which follows it on the
device, is computed.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.attention.base import Decode, DecodeLayer
from kvpolicy.attention.choose import backend_for
from kvpolicy.attention.draw import SamplingColumns, SamplingNumbers, columns_of, draw
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.layouts.base import LayerCache
from kvpolicy.cache.rings import LAST_STATES, StateRing, put_states
from kvpolicy.devices import Download, upload
from kvpolicy.errors import KVPolicyError

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
        tensor: ``[S]`` or ``[S, layers, H_kv]``, int64, on the device; equal in all heads.
        known: Its contents, ``[S]`` or ``[layers, S]``, `_UNKNOWN` where they are not known.
    """

    def __init__(self, device: torch.device, num_slots: int, *per_slot: int) -> None:
        self.tensor = torch.zeros(num_slots, *per_slot, dtype=torch.int64, device=device)
        self.known = np.full((*per_slot[:1], num_slots), _UNKNOWN, dtype=np.int64)

    def set(self, values: np.ndarray) -> None:
        """Write the numbers of the first slots, ``[W]`` or ``[layers, W]``, where they differ."""
        width = values.shape[-1]
        known = self.known[..., :width]
        differs = known != values
        if not differs.any():
            return
        slots = np.flatnonzero(differs if differs.ndim == 1 else differs.any(axis=0))
        known[...] = values
        device = self.tensor.device
        new = upload(values[..., slots].T, device)
        index = slice(width) if len(slots) == width else upload(slots, device)
        self.tensor[index] = new if values.ndim == 1 else new[..., None]


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
            of a head in the mean, see `kvpolicy.cache.layouts.segments`.
        drawn_by: The sampling columns that the slots need; with others a step is another one.
        tokens: Tokens of the newest two steps, ``[2, S]``, int64.
        rings: What keeps states of the steps.
    """

    def __init__(
        self,
        cache: KVCache,
        rings: Iterable[StateRing] = (),
        *,
        in_graph: bool = False,
        padded: bool = False,
        once: bool = False,
    ) -> None:
        """Allocate the state of all slots.

        Args:
            cache: The KV cache.
            rings: Keep states of the steps.
            in_graph: Whether a step must not read anything on the host, because it is compiled;
                always so on a GPU.
            padded: Whether a step serves a power of 2 of slots, or all, so that there are few
                widths.
            once: Whether there is one step only, so that nothing is loaded to make it fast.

        Raises:
            KVPolicyError: A layer cannot be served, see `Layer.static_problem`.
        """
        for layer in cache.layers:
            if (problem := layer.static_problem) is not None:
                msg = (
                    f"decode steps cannot be static: layer {layer.index} {problem}; give the "
                    "engine eager=True"
                )
                raise KVPolicyError(msg)
        device = cache.layers[0].shape.device
        self.in_graph = in_graph or device.type != "cpu"
        self._padded, self._once = padded, once
        num_slots = self.width = self.num_served = cache.num_slots
        self.cache, self.rings = cache, tuple(rings)
        num_heads = max(layer.shape.num_kv_heads for layer in cache.layers)
        self._token_ids = _Mirrored(device, num_slots)
        self._seq_len = _Mirrored(device, num_slots)
        self._taken = [_Mirrored(device, num_slots) for _ in self.rings]
        self._rows = _Mirrored(device, num_slots, len(cache.layers), num_heads)
        self.token_ids, self.seq_len = self._token_ids.tensor, self._seq_len.tensor
        self.rows = self._rows.tensor
        self.live = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(2, num_slots, dtype=torch.int64, device=device)
        self._num_steps = torch.zeros(1, dtype=torch.int64, device=device)  # that follow each other
        self._place = 0  # of the tokens of the step under way
        self._num_live = 0  # the first slots, if only these take part
        capacity = np.where(cache.slides, cache.capacity, np.iinfo(np.int64).max)
        self._most_rows = upload(capacity, device)[:, None]
        self._continuations: list[Continuation] = []
        self._all_columns = SamplingColumns(
            temperature=torch.zeros(num_slots, dtype=torch.float32, device=device),
            seed=torch.zeros(num_slots, dtype=torch.int64, device=device),
            top_k=torch.zeros(num_slots, dtype=torch.int64, device=device),
            top_p=torch.ones(num_slots, dtype=torch.float64, device=device),
            min_p=torch.zeros(num_slots, dtype=torch.float32, device=device),
        )
        self._columns = SamplingColumns()
        self.drawn_by: tuple[str, ...] = ()
        self._stop_ids = self._no_stop_ids(_NUM_STOP_IDS)
        self._max_len = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._layers: list[LayerCache] = []
        self._opened: list[DecodeLayer] = []
        self._attention: list[Decode] = []

    @property
    def position_ids(self) -> Tensor:
        """Position of the new token of each slot, ``[W, 1]``."""
        return self.seq_len[: self.width, None]

    @property
    def addresses(self) -> list[int]:
        """Where the tensors of the cache and of the slots are that may move."""
        tensors = [tensor for layer in self._layers for tensor in layer.tensors]
        return [tensor.data_ptr() for tensor in (*tensors, self._stop_ids)]

    def begin(
        self,
        token_ids: Sequence[int] | None,
        continuations: Sequence[Continuation] | None,
        taken: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take over what the host knows of the first slots.

        Args:
            token_ids: Their newest tokens; ``None``: those that the step before has drawn for the
                same slots, which take part unless they have their last token.
            continuations: How they are continued; ``None``: as before.
            taken: For each ring, the tokens of each sequence whose states were taken.
        """
        cache = self.cache
        served = self.num_served if token_ids is None else len(token_ids)
        width = width_for(served, cache.num_slots) if self._padded else served
        self._serve(width)
        empty = [0] * (width - served)
        if token_ids is None:
            self._place = 1 - self._place
            self._token_ids.known[:width] = _UNKNOWN
        else:
            self._place, self.num_served = 0, served
            self._num_steps.zero_()
            self._token_ids.set(np.array([*token_ids, *empty], dtype=np.int64))
            if self._num_live != served:
                self.live.zero_()[:served] = True
                self._num_live = served
        self._seq_len.set(cache.seq_len[:width])
        for mirrored, numbers in zip(self._taken, taken, strict=True):
            mirrored.set(np.array([*numbers, *empty], dtype=np.int64))
        self._rows.set(cache.rows[:, :width])
        if continuations is not None and self._continuations != continuations:
            self._continue(list(continuations))

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
        output = self._attention[layer_idx](
            query, key, value, scaling=scaling, softcap=softcap or 0.0, sinks=sinks
        )
        return output[:, :, None]

    def keep_states(self, place: int, states: Tensor) -> None:
        """Keep states of the new tokens in the rings that want them.

        Args:
            place: The layer whose attention they enter, or `LAST_STATES`.
            states: ``[N, M]``, of all slots that are served, or of those that take part.
        """
        width = len(states)
        for ring, taken in zip(self.rings, self._taken, strict=True):
            tensor = ring.tensors.get(place)
            if tensor is not None:
                pending = self.seq_len[:width] - taken.tensor[:width]
                put_states(tensor, states, pending, self.live[:width])

    def new_numbers(
        self, layer_idx: int, names: Sequence[str]
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Where the numbers of the new rows of a layer go.

        Returns:
            Tracks, ``[W, H_kv, R]``, or pools, ``[W, H_kv * R]``, where heads share their rows; the
            places of the new rows in them, ``[W, H_kv]``; their positions and the slots that take
            part, ``[W]`` each.
        """
        layer = self._opened[layer_idx]
        tracks = [self._layers[layer_idx].tracks[name][: self.width] for name in names]
        if layer.bounds is not None:
            tracks = [track.flatten(1, 2) for track in tracks]
        return tracks, layer.places, layer.seq_len, layer.live

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
        if states is not None:
            self.keep_states(LAST_STATES, states[:, -1])
        place = self._num_steps % len(self.tokens)
        self.tokens[:, :width].index_copy_(0, place, drawn[None])
        self._num_steps += 1
        rows, counted = self.rows[:width], live.long()
        rows.copy_(torch.minimum(rows + counted[:, None, None], self._most_rows))
        seq_len += counted
        token_ids.copy_(torch.where(live, drawn.clamp(min=0), token_ids))
        stops = (self._stop_ids[:width] == drawn[:, None]).any(dim=1) | (drawn < 0)
        live &= ~(stops | (seq_len + 1 >= self._max_len[:width]))

    @property
    def newest_tokens(self) -> Tensor:
        """Tokens of the step, of each slot, ``[num_served]``."""
        return self.tokens[self._place, : self.num_served]

    def drawn(self) -> Download:
        """Tokens of the step, of each slot, on their way to the host.

        After its last token a slot has tokens of no meaning.
        """
        return Download(self.newest_tokens)

    def count(self, takes_part: Sequence[bool]) -> None:
        """Count the rows of the step, and advance the mirror by them.

        Args:
            takes_part: Whether the sequence of a slot goes on with the step. The device may not
                know that one has ended before.
        """
        cache, width = self.cache, self.num_served
        all_take_part = all(takes_part)
        cache.count(range(width), 1 if all_take_part else np.array(takes_part, dtype=np.int64))
        self._seq_len.known[:width] = cache.seq_len[:width]
        self._rows.known[:, :width] = cache.rows[:, :width]
        self._forget_ended(takes_part)

    def note_tokens(self, token_ids: Sequence[int], goes_on: Sequence[bool]) -> None:
        """Note what the host has read of the step, if no other has followed.

        Args:
            token_ids: The newest token of each slot.
            goes_on: Whether its sequence goes on. The device may not know that one has ended.
        """
        self._token_ids.known[: self.num_served] = token_ids
        self._forget_ended(goes_on)

    def _forget_ended(self, goes_on: Sequence[bool]) -> None:
        if not all(goes_on):
            ended = np.flatnonzero(~np.array(goes_on, dtype=bool))
            for mirrored in (self._token_ids, self._seq_len, self._rows):
                mirrored.known[..., ended] = _UNKNOWN
            self._num_live = 0

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
        self.drawn_by = tuple(name for name in _COLUMNS if getattr(columns, name) is not None)
        for name in self.drawn_by:
            getattr(self._all_columns, name)[:width] = getattr(columns, name)
        self._cut_columns()

    def _no_stop_ids(self, most: int) -> Tensor:
        size = (self.cache.num_slots, most)
        return torch.full(size, _UNKNOWN, dtype=torch.int64, device=self.live.device)

    def _cut_columns(self) -> None:
        """Let the columns that are needed be those of the slots served, where they always are."""
        self._columns = SamplingColumns(
            **{name: getattr(self._all_columns, name)[: self.width] for name in self.drawn_by}
        )

    @contextmanager
    def idle(self, width: int) -> Iterator[None]:
        """Serve so many slots in a ``with`` block, none of which takes part.

        Steps in the block store, count and draw nothing.
        """
        before, live = self.width, self.live.clone()
        # The tokens of the last step may not have been read yet.
        num_steps, tokens = self._num_steps.clone(), self.tokens.clone()
        self._serve(width)
        self.live.zero_()
        try:
            yield
        finally:
            self._serve(before)
            self.live.copy_(live)
            self._num_steps.copy_(num_steps)
            self.tokens.copy_(tokens)

    def _serve(self, width: int) -> None:
        """Take the first slots of all tensors that a step is given."""
        layers = self.cache.layers
        if width == self.width and self._layers and all(map(is_, layers, self._layers)):
            return
        self.width, self._layers = width, list(layers)
        self._opened = [self._open(index) for index in range(len(layers))]
        ways = {"in_graph": self.in_graph, "once": self._once}
        self._attention = [
            backend_for(one.keys.device, one.keys.dtype, **ways).bind(one) for one in self._opened
        ]
        self._cut_columns()

    def _open(self, layer_idx: int) -> DecodeLayer:
        """What attention in a layer reads and changes."""
        layer, served = self.cache.layers[layer_idx], slice(self.width)
        tracks = {name: track[served] for name, track in layer.tracks.items()}
        accumulated = [tracks.pop(name) for name in layer.accumulators]
        return DecodeLayer(
            keys=layer.store.keys.slab[served],
            values=layer.store.values.slab[served],
            positions=layer.positions[served],
            rows=self.rows[served, layer_idx, : layer.shape.num_kv_heads],
            seq_len=self.seq_len[served],
            live=self.live[served],
            tracks=list(tracks.values()),
            accumulated=accumulated,
            accumulators=layer.accumulators,
            window=_first(layer.window, served),
            bounds=_first(layer.bounds, served),
            sliding_window=layer.shape.sliding_window or 0,
            key_bits=layer.store.keys.bits,
            value_bits=layer.store.values.bits,
            exact_keys=_first(layer.store.keys.exact, served),
            exact_values=_first(layer.store.values.exact, served),
        )


def _first(tensor: Tensor | None, served: slice) -> Tensor | None:
    return None if tensor is None else tensor[served]
