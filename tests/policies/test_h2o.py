"""H2O against loops that accumulate the attention of every past query."""

import pytest
import reference
import torch
from compare import ATOL, assert_best_rows, assert_rows_shape, heads
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, rounds

from kvpolicy.errors import BudgetError
from kvpolicy.testing import Trial, keep_rows, replay

# Sums grow with the number of queries, and so does their rounding.
SUM_ATOL = 10 * ATOL


@given(st.data(), caches())
def test_prompt_keeps_heavy_hitters_and_recent_rows(data: st.DataObject, drawn: Drawn) -> None:
    n_recent = data.draw(st.integers(1, 6))
    budget = data.draw(budgets(drawn.num_rows, min_budget=n_recent))
    kept = keep_rows(
        "h2o", drawn.keys, drawn.values, drawn.queries, budget=budget, n_recent=n_recent
    )
    assert_rows_shape(kept, drawn.keys, budget)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        hitters = reference.HeavyHitters(len(queries))
        hitters.forward(keys, queries)
        assert_h2o_rows(kept[b, h].tolist(), hitters.scores(), budget, n_recent)


def assert_h2o_rows(kept: list[int], scores: list[float], budget: int, n_recent: int) -> None:
    window = min(n_recent, len(scores))
    candidates = scores[: len(scores) - window]
    assert_best_rows(kept, candidates, window=window, budget=budget, atol=SUM_ATOL)


@given(st.data(), caches(min_rows=2, max_rows=24))
def test_stream_accumulates_attention_of_all_queries_over_resident_rows(
    data: st.DataObject, drawn: Drawn
) -> None:
    n_recent = data.draw(st.integers(1, 4))
    budget = data.draw(st.integers(n_recent, max(n_recent, drawn.num_rows - 1)))
    plan = data.draw(rounds(drawn.num_rows))
    answer = replay(
        "h2o",
        drawn.keys,
        drawn.values,
        drawn.queries,
        budget=budget,
        n_recent=n_recent,
        **plan,
    )
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        ours = [kept[b, h].tolist() for kept in answer]
        follow_stream(keys, queries, ours, budget=budget, n_recent=n_recent, **plan)


def follow_stream(
    keys: list,
    queries: list,
    answer: list[list[int]],
    *,
    budget: int,
    n_recent: int,
    prompt: int,
    compact_at: list[int],
) -> None:
    """Check every round given the previous rounds, so that one tie does not affect the others."""
    hitters = reference.HeavyHitters(len(queries))
    resident: list[int] = []
    rounds_left = dict(zip(compact_at, answer, strict=True))
    for count in range(prompt, len(keys) + 1):
        new = range(prompt) if count == prompt else [count - 1]
        resident += new
        hitters.forward(
            [keys[t] for t in resident],
            [[head_queries[t] for t in new] for head_queries in queries],
        )
        if count in rounds_left:
            rows = [resident.index(position) for position in rounds_left.pop(count)]
            assert_h2o_rows(rows, hitters.scores(), budget, n_recent)
            hitters.keep(rows)
            resident = [resident[t] for t in rows]
    assert not rounds_left


@given(caches(min_rows=9))
def test_n_recent_defaults_to_half_of_the_budget(drawn: Drawn) -> None:
    kept = keep_rows("h2o", drawn.keys, drawn.values, drawn.queries, budget=8)
    explicit = keep_rows("h2o", drawn.keys, drawn.values, drawn.queries, budget=8, n_recent=4)
    assert (kept == explicit).all()
    assert (kept[:, :, -4:] == torch.arange(drawn.num_rows - 4, drawn.num_rows)).all()


@given(caches(min_rows=6))
def test_n_recent_equal_to_budget_is_a_sliding_window(drawn: Drawn) -> None:
    kept = keep_rows("h2o", drawn.keys, drawn.values, drawn.queries, budget=5, n_recent=5)
    assert (kept == torch.arange(drawn.num_rows - 5, drawn.num_rows)).all()


def test_row_attended_by_every_query_is_never_evicted() -> None:
    keys = torch.randn(1, 2, 40, 4, generator=torch.Generator().manual_seed(0)) * 0.01
    keys[:, :, 17] = 10.0
    queries = torch.ones(1, 4, 40, 4)
    answer = replay(
        "h2o", keys, keys, queries, budget=4, n_recent=2, prompt=20, compact_at=range(20, 41)
    )
    assert all((kept == 17).any(dim=-1).all() for kept in answer)


def test_budget_below_the_recent_rows_raises() -> None:
    keys = torch.zeros(1, 1, 20, 2)
    with pytest.raises(BudgetError, match="h2o"):
        keep_rows("h2o", keys, keys, keys, budget=3, n_recent=4)


def test_attention_products_above_the_float16_range_give_valid_weights() -> None:
    sizes = {"kv_heads": 2, "group": 2, "head_dim": 8}
    trial = Trial("h2o", budget=3, **sizes, dtype="float16", numbers="large", seed=7133)
    trial.arrive(prompt=1, new=5)
    trial.finish()
