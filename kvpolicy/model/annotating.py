"""Annotating: policies give the new rows of a layer numbers, asked from Python within a forward.

In a graph, asking is one call of the operator ``kvpolicy::annotate``, which says which tracks it
changes: policies run as they are, and the graph has no break.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import ModelError
from kvpolicy.model.forward_input import Annotating, ForwardInput, forward_under_way

_LIBRARY = torch.library.Library("kvpolicy", "FRAGMENT")
_LIBRARY.define(
    "annotate(Tensor states, Tensor key, Tensor value, Tensor(a!)[] tracks, Tensor rows, "
    "Tensor seq_len, Tensor live, int layer_idx) -> ()"
)


def annotate_stored_rows(given: ForwardInput, layer_idx: int, keys: Tensor, values: Tensor) -> None:
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
    assert isinstance(step, EagerStep)
    arguments = step.new_rows(layer_idx, states, keys, values)
    step.annotate(layer_idx, given.annotating.ask(layer_idx, *arguments))


def annotate_static_rows(given: ForwardInput, layer_idx: int, key: Tensor, value: Tensor) -> None:
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
        store = step.cache.layers[layer_idx].store
        key, value = store.keys.as_read(key[:, :, 0]), store.values.as_read(value[:, :, 0])
        written = step.new_numbers(layer_idx, names)
        if step.in_graph:
            torch.ops.kvpolicy.annotate.default(states, key, value, *written, layer_idx)
        else:
            _annotate(given.annotating, states, key, value, *written, layer_idx)


def _taken_input(given: ForwardInput) -> Tensor | None:
    """What entered the attention of this layer, which is needed no more."""
    states, given.attention_input = given.attention_input, None
    return states


def input_hook(layer_idx: int, hidden_size: int) -> Any:
    """Notes what enters the attention of a layer, where its new rows are annotated."""

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: ForwardInput | None = kwargs.get("kvpolicy_forward")
        if given is not None and given.annotating is not None:
            states = args[0] if args else kwargs.get("hidden_states")
            given.attention_input = _checked(states, hidden_size, layer_idx)

    return note


def _checked(states: object, hidden_size: int, layer_idx: int) -> Tensor:
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


def _ask(*tensors: Any) -> None:
    annotating = forward_under_way().annotating
    assert annotating is not None, "a forward whose rows are annotated says by whom"
    _annotate(annotating, *tensors)


def _annotate(
    annotating: Annotating,
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
    annotations = annotating.ask(layer_idx, states, key, value, seq_len)
    for name, track in zip(annotating.tracks[layer_idx], tracks, strict=True):
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
