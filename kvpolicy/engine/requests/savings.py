"""What a plan saves against a full cache, and what a user should know of what it evicted."""

from collections.abc import Callable

from kvpolicy.plan.plan import default_buffer
from kvpolicy.plan.resolved import ResolvedPlan


def saved_share(held_bytes: int, full_bytes: int) -> float:
    """The share of a full cache that was not needed, from 0 to 1.

    Args:
        held_bytes: Bytes of keys, values and states that were held at most.
        full_bytes: Those of a full cache of the same tokens.
    """
    return 1 - held_bytes / full_bytes if full_bytes else 0.0


def _as_argument(key: str, value: int) -> str:
    return f"{key}={value}"


def nothing_evicted(
    plan: ResolvedPlan,
    rows_evicted: int,
    longest: int,
    setting: Callable[[str, int], str] = _as_argument,
) -> str | None:
    """A sentence for a run in which policies had nothing to evict.

    Args:
        plan: The plan of the run.
        rows_evicted: Rows that were evicted.
        longest: Rows of the longest sequence in any layer, 0 if there was none.
        setting: Writes a setting to try, such as ``budget=64``.

    Returns:
        The sentence; ``None`` if rows were evicted, or the plan never evicts.
    """
    layers = plan.compacting_layers()
    if rows_evicted or not layers or not longest:
        return None
    sizes = sorted({(layer.budget or 0, layer.buffer) for layer in layers})
    ends = dict.fromkeys((sizes[0], sizes[-1]))
    told = " to ".join(f"{budget:,} + {buffer:,}" for budget, buffer in ends)
    sentence = (
        f"nothing was evicted: the longest sequence had {longest:,} rows, and budget and buffer "
        f"are {told}"
    )
    if any(layer.keeps_prompt for layer in layers):
        return f"{sentence} behind the rows of its prompt, which stay"
    if len(sizes) > 1 or not all(layer.bounded for layer in layers):
        return sentence
    # Half of the sequence: the default buffer of that budget fits into the other half.
    (_, buffer), most = sizes[0], max(layer.num_protected for layer in layers)
    budget = max((longest - 1) // 2, most, 1)
    to_try = [setting("budget", budget)]
    if budget + buffer >= longest:
        buffer = default_buffer(budget)
        to_try.append(setting("buffer", buffer))
    return f"{sentence}; try {' '.join(to_try)}" if budget + buffer < longest else sentence


def longest_kept(plan: ResolvedPlan) -> int | None:
    """Tokens of a sequence of which no row is evicted at any time; ``None``: any number.

    Args:
        plan: The plan.
    """
    return min((layer.budget or 0 for layer in plan.compacting_layers()), default=None)


def evicted_in_prompt(plan: ResolvedPlan, longest_prompt: int) -> str | None:
    """A sentence for a run in which rows of a prompt left before its end was read.

    A policy chooses them without the tokens that follow, such as the question behind a document.

    Args:
        plan: The plan of the run.
        longest_prompt: Tokens of the longest prompt.
    """
    sizes = [
        (layer.budget or 0, layer.prefill_buffer or layer.buffer)
        for layer in plan.compacting_layers()
        if layer.bounded and not layer.keeps_prompt
    ]
    budget, buffer = min(sizes, key=sum, default=(longest_prompt, 0))
    if longest_prompt <= budget + buffer:
        return None
    key = "prefill_buffer" if plan.stages else "buffer"
    return (
        "rows left before the end of a prompt was read: the longest had "
        f"{longest_prompt:,} tokens, and budget and {key} are {budget:,} + {buffer:,}; what is "
        'asked at the end is better asked first, or the rows of prompts kept with prompt = "keep"'
    )
