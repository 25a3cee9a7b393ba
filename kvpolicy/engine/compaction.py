"""Compaction: score, select and evict, for the sequences of one layer that are due."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.slab import ATTN_SUMS, Cache
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import Clock
from kvpolicy.state import Memory, SequenceMemory


def compact(
    cache: Cache,
    layer_idx: int,
    slots: Sequence[int],
    stack: Stack,
    budgets: Sequence[int],
    memories: Sequence[SequenceMemory],
    clock: Clock,
    asking: Callable[[Sequence[int]], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> None:
    """Bring the given slots of one layer within their budget.

    Args:
        cache: The slabs; changed in place.
        layer_idx: Decoder layer, counted from 0.
        slots: Slots that are due. Those within the budget already are left alone.
        stack: The layer's policies.
        budgets: Rows that stay in each of them.
        memories: What policies remember of the sequence in each of the slots.
        clock: Where the seconds go.
        asking: Makes the block in which some of the slots, given by their places in
            ``slots``, are asked about.

    Raises:
        HookError: If a policy raises.
        HookResultError: If a policy's answer breaks the contract.
    """
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for place, (slot, budget) in enumerate(zip(slots, budgets, strict=True)):
        num_rows = int(cache.rows[layer_idx, slot])
        if num_rows > budget:
            # Hooks see no padding: sequences with as many rows, and as many remembered
            # queries, are asked about together.
            window = min(int(cache.seq_len[slot]), stack.window_size)
            groups[budget, num_rows, window].append(place)
    for (budget, _, _), places in groups.items():
        rows = LayerRows(cache, layer_idx, [slots[place] for place in places])
        memory = Memory([memories[place] for place in places])
        with asking(places):
            _compact_rows(rows, layer_idx, stack, budget, memory, clock)


def _compact_rows(
    rows: LayerRows, layer_idx: int, stack: Stack, budget: int, memory: Memory, clock: Clock
) -> None:
    positions = rows.positions
    device = positions.device
    with clock.time("score_s", device):
        scores = stack.score(rows, layer_idx, _score_arguments(rows, stack, budget, memory))
        unseen = rows.out_of_sight
        if unseen is not None:  # in some heads; what all heads have lost sight of is gone
            scores = scores.masked_fill(unseen, float("-inf"))
    with clock.time("select_s", device):
        keep = stack.select(scores, positions, budget, layer_idx, memory)
    with clock.time("compaction_s", device):
        stack.evict(rows, keep, layer_idx, memory)


def _score_arguments(rows: LayerRows, stack: Stack, budget: int, memory: Memory) -> dict[str, Any]:
    """What `score` may name; what nobody names is not computed and passed as ``None``."""
    reads = stack.reads
    return {
        "keys": rows.keys if "keys" in reads else None,
        "values": rows.values if "values" in reads else None,
        "positions": rows.positions,
        "queries": rows.queries if "queries" in reads else None,
        "attn_weights": rows.attn_weights if "attn_weights" in reads else None,
        "attn_sums": rows.track(ATTN_SUMS) if ATTN_SUMS in reads else None,
        "seq_len": rows.seq_len,
        "budget": budget,
        "tracks": rows.tracks,
        "memory": memory,
    }
