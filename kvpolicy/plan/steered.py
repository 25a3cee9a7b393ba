"""Whether a plan steers where its policies say they steer."""

from kvpolicy.errors import PlanError
from kvpolicy.plan.layercover import named
from kvpolicy.plan.resolved import ResolvedPlan


def check_steered(plan: ResolvedPlan) -> None:
    """Refuse a plan one of whose policies steers a layer that it does not serve.

    Such a policy would change nothing, and nobody would be told.

    Raises:
        PlanError: If a policy steers another layer than those whose stack it is in.
    """
    stacks = plan.stacks()
    for stack in dict.fromkeys(stacks):
        served = [layer_idx for layer_idx, other in enumerate(stacks) if other is stack]
        for name, layers in stack.steering:
            missed = sorted(set(layers or ()) - set(served))
            if missed:
                msg = (
                    f"{plan.name}: policy '{name}' steers layer {missed[0]}, but its stack is "
                    f"that of {named(served)} only, of {len(stacks)} layers counted from 0; "
                    "steer one of those, or list the policy there"
                )
                raise PlanError(msg)
