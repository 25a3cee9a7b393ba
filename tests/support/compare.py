"""Whether two selections of rows, or two results, are equal.

Rows are compared by their scores, up to rounding.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import reference
import torch
from torch import Tensor

from kvpolicy import Result

#: Tolerance between two computations of one score: fp32 against double precision.
ATOL = 2e-6


def assert_best_rows(
    kept: Sequence[int],
    scores: Sequence[float],
    *,
    budget: int,
    window: int = 0,
    atol: float = ATOL,
) -> None:
    """Check that ``kept`` are the ``window`` newest rows and the best of the rest.

    ``scores`` are those of the rows before the window. Of exactly equal scores (plateaus of
    maximum pooling) the newer row is kept; scores closer than ``atol`` may be in any order.
    """
    num_rows = len(scores) + window
    if num_rows <= budget:
        assert list(kept) == list(range(num_rows))
        return
    expected = reference.with_window(scores, window, budget)
    if list(kept) == expected:
        return
    assert list(kept) == sorted(set(kept)), f"not increasing: {kept}"
    assert len(kept) == budget
    extra, missing = set(kept) - set(expected), set(expected) - set(kept)
    assert max(missing) < len(scores), f"rows of the window are missing: {sorted(missing)}"
    assert_threshold(kept, scores, atol=atol)
    values = {scores[t] for t in extra | missing}
    assert len(values) > 1, (
        f"equal scores, but {sorted(extra)} were kept instead of {sorted(missing)}"
    )


def assert_threshold(kept: Sequence[int], scores: Sequence[float], *, atol: float) -> None:
    """Check that no rejected row has a higher score than a kept one, up to ``atol``."""
    inside = [scores[t] for t in range(len(scores)) if t in set(kept)]
    outside = [scores[t] for t in range(len(scores)) if t not in set(kept)]
    if inside and outside:
        assert min(inside) >= max(outside) - atol, (min(inside), max(outside))


def follow_stream(
    keys: list,
    queries: list,
    answer: Sequence[Sequence[int]],
    compact_at: Sequence[int],
    score: Callable[[list, list], list[float]],
    *,
    window: int,
    budget: int,
) -> None:
    """Check the rows kept for a stream of one head, for methods that score from the cache alone.

    After a compaction, the authors' cache holds the kept rows by descending score and then the
    window, so pooling neighbours and the newest row follow that order. Every round is checked
    given the previous rounds, so that one tie does not affect the others.
    """
    cache: list[int] = []  # positions, in the authors' order
    seen = 0
    for kept, count in zip(answer, compact_at, strict=True):
        cache += range(seen, count)
        seen = count
        if len(cache) <= budget:
            assert list(kept) == sorted(cache)
            continue
        scores = score([keys[t] for t in cache], [head[:count] for head in queries])
        score_of = dict(zip(cache, scores, strict=False))
        newest = cache[len(scores) :]
        in_order = sorted(cache)
        assert_best_rows(
            [in_order.index(position) for position in kept],
            [score_of[position] for position in in_order[: len(scores)]],
            window=window,
            budget=budget,
        )
        kept_rows = [position for position in cache[: len(scores)] if position in kept]
        kept_rows.sort(key=lambda position: -score_of[position])
        gaps = [score_of[a] - score_of[b] for a, b in pairwise(kept_rows)]
        if any(0 < gap < ATOL for gap in gaps):
            return  # rounding may have swapped these two
        cache = kept_rows + newest


def heads(keys: Tensor, queries: Tensor) -> list[tuple[int, int, list, list]]:
    """Every ``(b, h, keys, queries)`` of a batch as lists, in the shape that oracles expect."""
    batch, num_kv_heads = keys.shape[:2]
    grouped = queries.double().unflatten(1, (num_kv_heads, -1))
    return [
        (b, h, keys[b, h].double().tolist(), grouped[b, h].tolist())
        for b in range(batch)
        for h in range(num_kv_heads)
    ]


def layers(keys: Tensor, queries: Tensor) -> list[tuple[int, list, list]]:
    """Every ``(b, keys of all KV heads, queries of all groups)`` of a batch as lists."""
    found: dict[int, tuple[list, list]] = {}
    for b, _, of_keys, of_queries in heads(keys, queries):
        all_keys, all_queries = found.setdefault(b, ([], []))
        all_keys.append(of_keys)
        all_queries.append(of_queries)
    return [(b, all_keys, all_queries) for b, (all_keys, all_queries) in found.items()]


def assert_rows_shape(kept: Tensor, keys: Tensor, budget: int) -> None:
    """Check that ``keep_rows`` returned ``[B, H_kv, min(budget, T)]``, int64, increasing."""
    batch, num_kv_heads, num_rows = keys.shape[:3]
    assert kept.dtype == torch.int64
    assert kept.shape == (batch, num_kv_heads, min(budget, num_rows))
    assert (kept.diff(dim=-1) > 0).all()
    assert kept.min() >= 0
    assert kept.max() < num_rows


def result_values(result: Result) -> tuple[Any, ...]:
    """The fields of a result that do not depend on time or on other requests."""
    return (
        result.tokens,
        result.finish_reason,
        result.compactions,
        result.rows_evicted,
        result.peak_rows,
        result.peak_bytes,
    )
