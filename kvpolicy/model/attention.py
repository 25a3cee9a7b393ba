"""The attention function that the model calls in every layer: from a forward to a backend.

Its queries are after RoPE. How attention is computed is `kvpolicy.attention`; here is which rows
are attended to, and what is recorded of it for policies: the most recent queries, and what rows
accumulate of the attention that they receive.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.attention import eager
from kvpolicy.attention.base import window_factor
from kvpolicy.attention.softmax import PLAIN, Softmax
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import ModelError
from kvpolicy.model.annotating import annotate_static_rows
from kvpolicy.model.config import hiding_window
from kvpolicy.model.forward_input import ForwardInput, forward_under_way

_LIBRARY = torch.library.Library("kvpolicy", "FRAGMENT")
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer_idx, float scaling, float? softcap, "
    "Tensor? sinks) -> Tensor"
)

# A layer of an eager forward in a recording, see `store_and_attend`.
ATTEND = torch.ops.kvpolicy.attend.default


def attend(
    step: EagerStep,
    layer_idx: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Attend from the new tokens of a step to all rows of their slots.

    Args:
        step: The layout of the forward; it has stored the new rows already.
        layer_idx: Decoder layer, counted from 0. Its rows may be those of another one, its source.
        queries: Queries after RoPE, ``[B, H_q, L, D]``.
        keys: What `EagerStep.store` returned for the layer that holds them, ``[B, H_kv, T, D]``.
        values: Values of the same rows.
        scaling: Factor on the logits.
        softmax: The layer's softmax.

    Returns:
        Attention output, ``[B, H_q, L, D]``.
    """
    shape = step.cache.layers[layer_idx].shape
    held_in = layer_idx if shape.source is None else shape.source
    layer, opened = step.cache.layers[held_in], step.layers[held_in]
    step.attended.add(layer_idx)
    layer.softmax = softmax
    if opened.remembers:
        opened.remember(_as_policies_read(queries, scaling), shape.reader)
    if opened.held is not None:
        return eager.attend_beside(
            queries, opened.held, (keys, values), opened.visible, scaling=scaling, softmax=softmax
        )
    accumulated = {
        name: keys.new_zeros(keys.shape[:3], dtype=torch.float32) for name in layer.accumulators
    }
    output = eager.attend(
        queries,
        keys,
        values,
        opened.visible,
        scaling=scaling,
        softmax=softmax,
        accumulated=accumulated,
        problems=step.problems,
    )
    for name, received in accumulated.items():
        opened.receive(name, received)
    return output


def store_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_idx: int,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Store the new rows of a layer in the eager forward under way, and attend.

    Args:
        query: ``[B, H_q, L, D]`` after RoPE.
        key: ``[B, H_kv, L, D]`` after RoPE.
        value: Likewise.
        layer_idx: Decoder layer, counted from 0.
        scaling: Factor on the logits.
        softcap: See `Softmax`.
        sinks: Likewise.

    Returns:
        ``[B, L, H_q, D]``.
    """
    step = forward_under_way().step
    assert isinstance(step, EagerStep), "static steps have an operator of their own"
    keys, values = step.store(layer_idx, key, value)
    softmax = PLAIN if softcap is None and sinks is None else Softmax(softcap, sinks)
    output = attend(step, layer_idx, query, keys, values, scaling, softmax)
    return output.transpose(1, 2).contiguous()


_LIBRARY.impl("attend", store_and_attend, "CompositeExplicitAutograd")


def _as_policies_read(queries: Tensor, scaling: float) -> Tensor:
    """Queries into which any other scaling than ``D ** -0.5`` is folded."""
    factor = window_factor(scaling, queries.shape[-1])
    return queries if factor == 1 else queries * factor


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    kvpolicy_forward: ForwardInput | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Adapt `attend` to transformers' ``AttentionInterface``.

    Args:
        module: The attention module, with its ``layer_idx``.
        query: ``[B, H_q, L, D]`` after RoPE.
        key: What the cache returned for this layer, ``[B, H_kv, T, D]``.
        value: Values of the same rows.
        attention_mask: Must be ``None``: the layout has the mask.
        dropout: Not used. It is here because functions of transformers have it here, and libraries
            that wrap all of them, as kvpress does when it is imported, give it without its name.
        scaling: Factor on the logits; default ``D ** -0.5``.
        kvpolicy_forward: The forward under way.
        kwargs: What the model passes to every attention function; ``softcap``, ``s_aux`` and
            ``sliding_window`` are used.

    Returns:
        ``[B, L, H_q, D]`` and no weights.

    Raises:
        ModelError: If the model needs attention that is not computed here.
    """
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    if kvpolicy_forward is not None and (layer_idx is None or layer_idx < 0):
        # Layers that share a module pass their number to the cache only.
        layer_idx = kvpolicy_forward.newest_layer
    reason = None
    if kvpolicy_forward is None:
        reason = "it does not pass the arguments of a forward to its attention"
    elif attention_mask is not None:
        reason = "it masks its attention in its own way"
    else:
        step = kvpolicy_forward.step
        own = step.cache.layers[layer_idx].shape
        shape = own if own.source is None else step.cache.layers[own.source].shape
        window = kwargs.get("sliding_window")
        if window is not None:
            window = hiding_window(window, getattr(module, "config", None))
        if key.shape[1] != shape.num_kv_heads:
            reason = (
                f"it attends with {key.shape[1]} key heads, more than it stores: "
                f"{shape.num_kv_heads}, which it repeats itself in an order of its own"
            )
        elif window != shape.sliding_window:
            reason = (
                f"its layer {layer_idx} attends to a window of {window}, "
                f"its configuration says {shape.sliding_window}"
            )
        elif shape.num_readers > 1:
            reason = _sharing_problem(step, layer_idx, query, key, kwargs)
    if reason is not None:
        msg = f"a model with {type(module).__name__} cannot be run: {reason}"
        raise ModelError(msg)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if isinstance(step, StaticStep):
        output = step.attend(layer_idx, query, key, value, scaling, softcap, sinks)
        assert kvpolicy_forward is not None
        if kvpolicy_forward.annotating is not None:
            annotate_static_rows(kvpolicy_forward, layer_idx, key, value)
    elif kvpolicy_forward is not None and kvpolicy_forward.in_graph:
        return ATTEND(query, key, value, layer_idx, scaling, softcap, sinks), None
    else:
        softmax = PLAIN if softcap is None and sinks is None else Softmax(softcap, sinks)
        output = attend(step, layer_idx, query, key, value, scaling, softmax)
    return output.transpose(1, 2).contiguous(), None


def _sharing_problem(
    step: EagerStep | StaticStep,
    layer_idx: int,
    query: Tensor,
    key: Tensor,
    kwargs: Mapping[str, Any],
) -> str | None:
    """Why the attention of a layer that shares rows with others is not as the configuration says.

    Args:
        step: The step under way.
        layer_idx: The layer.
        query: Its queries, ``[B, H_q, L, D]``.
        key: The keys that it attends to, ``[B, H_kv, T, D]``.
        kwargs: What the model passes to every attention function.
    """
    shape = step.cache.layers[layer_idx].shape
    source = layer_idx if shape.source is None else shape.source
    layer = step.cache.layers[source]
    num_heads = layer.shape.num_heads // layer.shape.num_readers
    if not isinstance(step, EagerStep):
        return "static steps do not serve layers that attend to the rows of others"
    if query.shape[1] != num_heads:
        return (
            f"its layer {layer_idx} attends with {query.shape[1]} query heads to the rows of layer "
            f"{source}, its configuration says {num_heads}"
        )
    if shape.source is not None:
        rows = step.shared_rows.get(source)
        if rows is None or key is not rows[0]:
            return (
                f"its layer {layer_idx} attends to other keys than those of layer {source}, whose "
                "rows it shares by its configuration"
            )
        if kwargs.get("softcap") != layer.softmax.softcap:
            return f"its layers {source} and {layer_idx} attend to one row with different soft caps"
    if kwargs.get("s_aux") is not None:
        return f"layers that share rows have learned sinks, such as its layer {layer_idx}"
    return None
