"""Which layers of a model can let their KV heads share the rows of a budget."""

from kvpolicy.errors import PlanError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.plan.resolved import ResolvedPlan


def check_heads(plan: ResolvedPlan, adapter: ModelAdapter) -> None:
    """Refuse a plan with ``heads = "shared"`` for layers that cannot have it.

    A layer with a sliding window drops the rows that no head sees in all heads together. Processes
    that share the heads of a layer would have to share their memory, too.

    Args:
        plan: The plan.
        adapter: The model.

    Raises:
        PlanError: A layer has a sliding window, or several processes hold its heads.
    """
    for layer, shape in zip(plan.layers, adapter.layer_shapes(), strict=True):
        if layer.heads == "own":
            continue
        reason = None
        if shape.sliding_window is not None:
            reason = f"that layer has a sliding window of {shape.sliding_window} tokens"
        elif adapter.processes.num_shards > 1:
            reason = f"{adapter.processes.num_shards} processes hold its heads"
        if reason is not None:
            msg = (
                f"{plan.name} lets the KV heads of layer {layer.layer_idx} share its rows, and "
                f'{reason}; write heads = "own" for this layer'
            )
            raise PlanError(msg)
