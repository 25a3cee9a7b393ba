"""What became of a request, and whether it is what becomes of it alone."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.cache.slab import KVCache
from kvpolicy.testing.clauses import ConformanceError
from kvpolicy.testing.watch import Kept

# Scores that are closer than this, in units of the largest, may change places: a batch of
# another shape adds up in another order.
_NOISE = 1e-4


@attrs.frozen
class Arrival:
    """One request: which prompt, how long, and how many tokens are wanted."""

    number: int
    prompt: int
    new: int


@attrs.frozen(eq=False)
class Story:
    """What became of one request: its tokens, and what stayed at each compaction."""

    tokens: tuple[int, ...]
    trace: Sequence[Kept]
    cancelled: bool


class BatchDependenceError(ConformanceError):
    """A request was not served as it is alone; why is found out later.

    Attributes:
        arrival: The request.
    """

    def __init__(self, arrival: Arrival, expected: str, came: str) -> None:
        super().__init__("neighbours", expected, came)
        self.arrival = arrival


def differs(story: Story, alone: Story) -> tuple[str, str] | None:
    """Where a story parts from the same request's alone: what was expected, what came."""
    for came, expected in zip(story.trace, alone.trace, strict=False):
        where = f"in layer {expected.layer_idx} after {expected.seq_len} tokens"
        if (came.layer_idx, came.seq_len) != (expected.layer_idx, expected.seq_len):
            other = f"in layer {came.layer_idx} after {came.seq_len} tokens"
            return f"a compaction {where}", f"one {other}"
        if not torch.equal(came.positions, expected.positions):
            if _is_noise(came, expected):
                return None
            kept = f"the positions {expected.positions.tolist()} stay {where}"
            return f"{kept}, as when it is served alone", f"{came.positions.tolist()}"
    num = len(story.tokens)
    ended = story.cancelled or len(story.trace) == len(alone.trace)
    if not ended:
        expected_ = f"{len(alone.trace)} compactions, as when it is served alone"
        return expected_, f"{len(story.trace)}"
    if story.tokens != alone.tokens[:num] or (not story.cancelled and num < len(alone.tokens)):
        return f"tokens {list(alone.tokens)}, as when it is served alone", f"{list(story.tokens)}"
    return None


def _is_noise(came: Kept, expected: Kept) -> bool:
    """Whether only rows of almost equal score changed places."""
    if not torch.equal(came.had, expected.had):
        return False
    a, b = came.scores.double(), expected.scores.double()
    if torch.equal(a, b) or not torch.equal(a.isinf(), b.isinf()):
        return False
    a, b = a.masked_fill(a.isinf(), 0), b.masked_fill(b.isinf(), 0)
    largest = float(torch.maximum(a.abs().max(), b.abs().max()))
    return bool(((a - b).abs() <= _NOISE * largest).all())


def check_cache(cache: KVCache, active: Sequence[object]) -> None:
    """See that the slabs hold what they say, in order of position."""
    for layer_idx, layer in enumerate(cache.layers):
        for slot in range(len(active)):
            num = int(cache.rows[layer_idx, slot])
            if num > cache.capacity[layer_idx]:
                expected = f"at most {cache.capacity[layer_idx]} rows in layer {layer_idx}"
                raise ConformanceError(clause="budget", expected=expected, came=f"{num} rows")
            positions = layer.positions[slot]
            if not _in_order(positions, num):
                expected = f"{num} positions that rise in layer {layer_idx}, then -1"
                raise ConformanceError(
                    clause="order", expected=expected, came=f"{positions.tolist()}"
                )


def _in_order(positions: Tensor, num: int) -> bool:
    filled, empty = positions[:, :num], positions[:, num:]
    return bool((filled.diff(dim=1) > 0).all() and (filled >= 0).all() and (empty == -1).all())
