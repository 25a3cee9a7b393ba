"""LazyEviction against loops that follow every step of a stream."""

from collections.abc import Callable

import pytest
import torch
from compare import assert_best_rows, heads
from hypothesis import assume, given
from hypothesis import strategies as st
from reference_lazy_eviction import LazyHead
from strategies import Drawn, caches
from torch import Tensor

from kvpolicy.errors import BudgetError
from kvpolicy.testing import keep_rows, replay

ALPHAS = (0.02, 0.08, 0.2, 0.4)


def assert_stream_equals(
    drawn: Drawn,
    answer: list[Tensor],
    compact_at: list[int],
    read_from: Callable[[int, int], int],
    *,
    window: int,
    budget: int,
    alpha: float,
) -> None:
    """Follow a stream, with the first query that is read for each span of tokens."""
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        head = LazyHead(keys, queries, alpha)
        seen = 0
        for kept, count in zip(answer, compact_at, strict=True):
            first = read_from(seen, count)
            head.follow(count, lambda step, first=first: step >= first)
            assume(head.closest > 1e-5)  # rounding would decide whether a row was used
            rows, scores, ours = list(head.last), head.scores(), kept[b, h].tolist()
            before = scores[: len(scores) - window]
            found = [rows.index(row) for row in ours]
            assert_best_rows(found, before, window=window, budget=budget)
            head.keep(ours)
            seen = count


@given(st.data(), caches(min_rows=20, max_rows=36), st.integers(1, 6), st.sampled_from(ALPHAS))
def test_every_step_behind_the_prompt_is_followed(
    data: st.DataObject, drawn: Drawn, window: int, alpha: float
) -> None:
    # As the authors do: nothing of the prompt is read, and rows leave every `window` steps.
    prompt = data.draw(st.integers(4, drawn.num_rows - window))
    budget = data.draw(st.integers(window, prompt + window - 1))
    compact_at = list(range(prompt + window, drawn.num_rows + 1, window))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    sizes = {"budget": budget, "prompt": prompt, "compact_at": compact_at}
    answer = replay("lazy_eviction", *inputs, **sizes, window_size=window, alpha=alpha)
    assert_stream_equals(
        drawn,
        answer,
        compact_at,
        lambda seen, count: max(seen, prompt),
        window=window,
        budget=budget,
        alpha=alpha,
    )


@given(st.data(), caches(min_rows=16, max_rows=32), st.integers(1, 6), st.sampled_from(ALPHAS))
def test_of_other_spans_the_last_queries_are_read(
    data: st.DataObject, drawn: Drawn, window: int, alpha: float
) -> None:
    budget = data.draw(st.integers(window, 8))
    counts = st.lists(st.integers(9, drawn.num_rows), min_size=1, max_size=4, unique=True)
    compact_at = sorted(data.draw(counts))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    sizes = {"budget": budget, "prompt": compact_at[0], "compact_at": compact_at}
    answer = replay("lazy_eviction", *inputs, **sizes, window_size=window, alpha=alpha)
    assert_stream_equals(
        drawn,
        answer,
        compact_at,
        lambda seen, count: max(seen, count - window),
        window=window,
        budget=budget,
        alpha=alpha,
    )


def test_a_row_that_recurs_outlasts_one_that_was_used_later() -> None:
    # Row 0 is used every third step, last at step 9; row 2 by the query of step 10 only.
    keys = torch.zeros(1, 1, 12, 2)
    keys[0, 0, 0], keys[0, 0, 2] = torch.tensor([40.0, 0.0]), torch.tensor([0.0, 40.0])
    queries = torch.zeros(1, 1, 12, 2)
    queries[0, 0, [3, 6, 9], 0], queries[0, 0, 10, 1] = 10.0, 10.0
    # Weights of the other queries are all alike, at most a quarter, and below alpha.
    kept = replay(
        "lazy_eviction",
        keys,
        keys,
        queries,
        budget=9,
        prompt=4,
        compact_at=[12],
        window_size=8,
        alpha=0.5,
    )
    assert kept[0].flatten().tolist() == [0, *range(4, 12)]


def test_budget_below_the_window_raises() -> None:
    keys = torch.zeros(1, 1, 40, 2)
    with pytest.raises(BudgetError, match="lazy_eviction"):
        keep_rows("lazy_eviction", keys, keys, keys, budget=31)
