"""What a plan says that changes nothing, as sentences for its user.

Such a plan runs, and its results are those of the plan without it: an experiment that compares the
two measures noise. What is known before the first token is said here; that a run evicted nothing
is in its report.
"""

from collections.abc import Iterator

from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.plan import format_layers
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan, needs_budget

# Hooks that matter only where rows leave.
_OF_EVICTION = {"allocate", "protect", "evict"}


def without_effect(plan: ResolvedPlan) -> list[str]:
    """What changes nothing in a plan: a sentence for each policy or key, with its layers.

    Args:
        plan: The plan.
    """
    layers: dict[tuple[str, str], list[int]] = {}
    for layer, stack in zip(plan.layers, plan.stacks(), strict=True):
        for found in _found(layer, stack):
            layers.setdefault(found, []).append(layer.layer_idx)
    sentences = [f"{what} in {format_layers(where)}{why}" for (what, why), where in layers.items()]
    if any(layer.prefill_buffer for layer in plan.layers) and not plan.stages:
        sentences.append("prefill_buffer changes nothing: no row leaves a layer that has it")
    return sentences


def _found(layer: LayerPlan, stack: Stack) -> Iterator[tuple[str, str]]:
    """What changes nothing in a layer: the sentence before and after its layers."""
    shares, evicts = layer.heads == "shared", needs_budget(stack)
    # The policies of the stack come first, then those that they consist of.
    own = zip(stack.names, stack.declared, stack.implemented, strict=False)
    for name, declared, hooks in own:
        what = f"policy '{name}' changes nothing"
        if declared.no_effect is not None:
            yield what, f": {declared.no_effect}"
        elif evicts and declared.needs_shared_heads and not shares:
            yield what, ': each KV head has the budget for itself; write heads = "shared"'
        elif not evicts and hooks <= _OF_EVICTION:
            yield what, ": no row ever leaves; list it with a policy that evicts"
    if shares and "heads" not in stack.reads:
        names = " + ".join(stack.names)
        why = f": no policy of {names} chooses how many rows each KV head keeps"
        yield 'heads = "shared" changes nothing', why
    for hook, below, above in stack.shadowed:
        why = f" where policy {above}, which is asked first, has an answer of its own"
        yield f"{hook}() of policy {below} is not called", why
