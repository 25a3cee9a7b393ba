"""Budgets of layers that a policy shares out, before anything runs."""

from collections.abc import Sequence

import attrs

from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.resolved import LayerPlan


def allocate(group: Sequence[LayerPlan], num_layers: int) -> list[LayerPlan]:
    """Let the policies of a group of layers share its rows.

    Args:
        group: Layers with the same stack and the same budget, which is not below what their
            policies protect.
        num_layers: Decoder layers of the model.

    Returns:
        The same layers in the order of their numbers, with the budgets that they end up with:
        their sum is what it was.

    Raises:
        HookError: If a policy raises.
        HookResultError: If its answer is not what `allocate` wants.
    """
    group = sorted(group, key=lambda layer: layer.layer_idx)
    budget = group[0].budget
    if budget is None:
        return group
    stack = Stack([(spec.policy, spec.build()) for spec in group[0].stack])
    floors = [max(layer.num_protected, 1) for layer in group]
    budgets = stack.allocate([layer.layer_idx for layer in group], budget, floors, num_layers)
    return [attrs.evolve(layer, budget=rows) for layer, rows in zip(group, budgets, strict=True)]
