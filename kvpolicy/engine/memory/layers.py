"""Which layers of a model can hold rows as a plan says."""

from kvpolicy.attention.integers import MULTIPLE
from kvpolicy.cache.shape import LayerShape
from kvpolicy.errors import PlanError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan
from kvpolicy.plan.spec import PLAIN_ROWS


def check_layers(plan: ResolvedPlan, adapter: ModelAdapter) -> None:
    """Refuse a plan for a model whose layers cannot hold rows as it says.

    Args:
        plan: The plan.
        adapter: The model.

    Raises:
        PlanError: It shares the rows of a layer among its heads, and that layer has a sliding
            window, or several processes hold its heads; or a layer with a sliding window has a
            ``prefill_buffer``; or it stores rows in integers whose heads have another size than a
            multiple of `MULTIPLE`.
    """
    for layer, shape in zip(plan.layers, adapter.layer_shapes(), strict=True):
        _check_heads(plan, layer, shape, adapter.processes.num_shards)
        _check_prefill_buffer(plan, layer, shape)
        _check_rows(plan, layer, shape)


def _check_heads(plan: ResolvedPlan, layer: LayerPlan, shape: LayerShape, num_shards: int) -> None:
    """A layer with a sliding window drops the rows that no head sees in all heads together.

    Processes that share the heads of a layer would have to share their memory, too.
    """
    if layer.heads == "own":
        return
    reason = None
    if shape.sliding_window is not None:
        reason = f"that layer has a sliding window of {shape.sliding_window} tokens"
    elif num_shards > 1:
        reason = f"{num_shards} processes hold its heads"
    if reason is not None:
        msg = (
            f"{plan.name} lets the KV heads of layer {layer.layer_idx} share its rows, and "
            f'{reason}; write heads = "own" for this layer'
        )
        raise PlanError(msg)


def _check_prefill_buffer(plan: ResolvedPlan, layer: LayerPlan, shape: LayerShape) -> None:
    """Rows leave a slab with a sliding window as tokens come, and those beside it would not."""
    is_asked = layer.stages and not layer.prefill_by_default
    if is_asked and shape.sliding_window is not None:
        msg = (
            f"{plan.name} gives layer {layer.layer_idx} a prefill_buffer of "
            f"{layer.prefill_buffer}, and that layer has a sliding window of "
            f"{shape.sliding_window} tokens; give its group prefill_buffer = {layer.buffer}"
        )
        raise PlanError(msg)


def _check_rows(plan: ResolvedPlan, layer: LayerPlan, shape: LayerShape) -> None:
    """The step and the least number of a row have an even address behind its codes."""
    if layer.rows != PLAIN_ROWS and shape.head_dim != shape.value_dim:
        msg = (
            f"{plan.name} stores the rows of layer {layer.layer_idx} in integers, and the keys of "
            f"this model have {shape.head_dim} channels, its values {shape.value_dim}; write "
            'rows = "model" for this layer'
        )
        raise PlanError(msg)
    if layer.rows != PLAIN_ROWS and shape.head_dim % MULTIPLE:
        msg = (
            f"{plan.name} stores the rows of layer {layer.layer_idx} in integers, and the heads of "
            f"this model have {shape.head_dim} channels, which is no multiple of {MULTIPLE}; write "
            'rows = "model" for this layer'
        )
        raise PlanError(msg)
