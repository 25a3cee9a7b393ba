"""Annotating: policies give the new rows of a layer numbers, asked from Python within a forward.

In a graph, asking is one call of the operator ``kvpolicy::annotate``, which says which tracks it
changes: policies run as they are, and the graph has no break. Whom it asks belongs to the forward
under way in its thread.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import attrs
import torch
from torch import Tensor

from kvpolicy.cache.layout import StepLayout
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import ModelError

# Asks for annotations: layer index, states [N, M], keys and values [N, H_kv, D], positions [N] ->
# numbers [N, H_kv] by the name of a track.
AskAnnotations = Callable[[int, Tensor, Tensor, Tensor, Tensor], Mapping[str, Tensor]]


@attrs.frozen(eq=False)
class Annotating:
    """Who annotates the new rows of one forward.

    Attributes:
        ask: Asks the policies of a layer.
        tracks: For each layer that is asked in a static step, the tracks that may be annotated.
    """

    ask: AskAnnotations
    tracks: Mapping[int, tuple[str, ...]] = attrs.field(factory=dict)


class HasAnnotating(Protocol):
    """The forward under way, as far as annotations need it.

    Attributes:
        annotating: Who annotates; ``None``: nobody.
        attention_input: What enters the attention of the layer under way, ``[B, L, M]``.
    """

    step: StepLayout | StaticStep
    annotating: Annotating | None
    attention_input: Tensor | None


_UNDER_WAY: ContextVar[Annotating | None] = ContextVar("annotating", default=None)

_LIBRARY = torch.library.Library("kvpolicy", "FRAGMENT")
_LIBRARY.define(
    "annotate(Tensor states, Tensor key, Tensor value, Tensor(a!)[] tracks, Tensor rows, "
    "Tensor seq_len, Tensor live, int layer_idx) -> ()"
)


@contextmanager
def annotating(under_way: Annotating | None) -> Iterator[None]:
    """Answer the operator in a ``with`` block."""
    token = _UNDER_WAY.set(under_way)
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)


def annotate_stored_rows(
    given: HasAnnotating, layer_idx: int, keys: Tensor, values: Tensor
) -> None:
    """Annotate the rows that a layer has just stored in a forward that is not static.

    Args:
        given: The forward.
        layer_idx: Decoder layer, counted from 0.
        keys: Keys after RoPE of the new tokens, ``[B, H_kv, L, D]``.
        values: Their values.
    """
    states = _taken_input(given)
    if states is None or given.annotating is None:
        return
    step = given.step
    assert isinstance(step, StepLayout)
    arguments = step.new_rows(layer_idx, states, keys, values)
    step.annotate(layer_idx, given.annotating.ask(layer_idx, *arguments))


def annotate_static_rows(given: HasAnnotating, layer_idx: int, key: Tensor, value: Tensor) -> None:
    """Annotate the rows that a layer has just stored in a static step, and keep states for later.

    Args:
        given: The forward.
        layer_idx: Decoder layer, counted from 0.
        key: Keys of the new rows after RoPE, ``[W, H_kv, 1, D]``.
        value: Their values.
    """
    states = _taken_input(given)
    if states is None or given.annotating is None:
        return
    step = given.step
    assert isinstance(step, StaticStep)
    states = states[:, -1]
    step.keep_states(layer_idx, states)
    names = given.annotating.tracks.get(layer_idx)
    if names:
        dtype = step.cache.layers[layer_idx].shape.dtype
        key, value = key[:, :, 0].to(dtype), value[:, :, 0].to(dtype)
        written = step.new_numbers(layer_idx, names)
        if step.in_graph:
            torch.ops.kvpolicy.annotate.default(states, key, value, *written, layer_idx)
        else:
            _annotate(given.annotating, states, key, value, *written, layer_idx)


def _taken_input(given: HasAnnotating) -> Tensor | None:
    """What entered the attention of this layer, which is needed no more."""
    states, given.attention_input = given.attention_input, None
    return states


def check_input(states: object, hidden_size: int, layer_idx: int) -> Tensor:
    """What a model gives its attention, if it is states of the expected shape.

    Raises:
        ModelError: If it is something else.
    """
    if not isinstance(states, Tensor) or states.dim() != 3 or states.shape[2] != hidden_size:
        msg = (
            f"the model cannot be run with policies that implement annotate(): the attention of "
            f"layer {layer_idx} is not given hidden states [B, L, {hidden_size}] as its "
            "first argument"
        )
        raise ModelError(msg)
    return states


def _ask(
    states: Tensor,
    key: Tensor,
    value: Tensor,
    tracks: list[Tensor],
    rows: Tensor,
    seq_len: Tensor,
    live: Tensor,
    layer_idx: int,
) -> None:
    under_way = _UNDER_WAY.get()
    assert under_way is not None, "a forward whose rows are annotated says by whom"
    _annotate(under_way, states, key, value, tracks, rows, seq_len, live, layer_idx)


def _annotate(
    under_way: Annotating,
    states: Tensor,
    key: Tensor,
    value: Tensor,
    tracks: list[Tensor],
    rows: Tensor,
    seq_len: Tensor,
    live: Tensor,
    layer_idx: int,
) -> None:
    """Ask for the annotations of one new row in every slot, and write them."""
    annotations = under_way.ask(layer_idx, states, key, value, seq_len)
    for name, track in zip(under_way.tracks[layer_idx], tracks, strict=True):
        if name in annotations:
            _write(track, annotations[name], rows, live)


def _write(track: Tensor, numbers: Tensor, rows: Tensor, live: Tensor) -> None:
    """Write numbers of the new row of every slot and KV head that takes part, in fixed shapes.

    Args:
        track: ``[W, H_kv, R]``, or the pools of slots whose heads have segments, ``[W, H_kv * R]``;
            changed in place.
        numbers: ``[W, H_kv]``.
        rows: Places of the new rows, ``[W, H_kv]``, int64.
        live: Slots that take part, bool ``[W]``.
    """
    if track.dim() == 3:
        rows, numbers = rows[..., None], numbers[..., None]
    before = track.gather(-1, rows)
    taken = live.view(-1, *[1] * (track.dim() - 1))
    track.scatter_(-1, rows, torch.where(taken, numbers.to(track.dtype), before))


_LIBRARY.impl("annotate", _ask, "CompositeExplicitAutograd")
torch.library.register_fake("kvpolicy::annotate", lambda *_: None, lib=_LIBRARY)
