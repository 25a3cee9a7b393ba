"""R-KV against its quadratic definition, written in loops."""

from functools import partial
from typing import Any

import pytest
import reference
import torch
from compare import ATOL, assert_best_rows, assert_rows_shape, follow_stream, heads
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, rounds

from kvpolicy import load_policy
from kvpolicy.errors import BudgetError
from kvpolicy.testing import keep_rows, replay


@st.composite
def knobs(draw: st.DrawFn, *, max_window: int = 8) -> dict[str, Any]:
    return {
        "mix_lambda": draw(st.sampled_from([0.0, 0.07, 0.1, 0.5, 1.0])),
        "window_size": draw(st.integers(1, max_window)),
        "kernel_size": draw(st.sampled_from([1, 3, 7])),
        "pooling": draw(st.sampled_from(["maxpool", "avgpool"])),
        "similarity_threshold": draw(st.sampled_from([0.5, 0.3, 0.8])),
        "retain_direction": draw(st.sampled_from(["last", "first"])),
    }


@given(st.data(), knobs())
def test_keeps_the_rows_of_the_reference(data: st.DataObject, knobs: dict) -> None:
    window = knobs["window_size"]
    drawn = data.draw(caches(min_rows=window + 1))
    budget = data.draw(budgets(drawn.num_rows, min_budget=window))
    kept = keep_rows("rkv", drawn.keys, drawn.values, drawn.queries, budget=budget, **knobs)
    assert_rows_shape(kept, drawn.keys, budget)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        scores = reference.rkv(keys, queries, **knobs)
        assert_best_rows(kept[b, h].tolist(), scores, window=window, budget=budget)


@given(st.data(), knobs())
def test_scores_equal_the_reference(data: st.DataObject, knobs: dict) -> None:
    drawn = data.draw(caches(min_rows=knobs["window_size"] + 1))
    ranks = torch.zeros(drawn.keys.shape[:3])
    # There may be more queries than its window if another policy of the stack needs more.
    scores = load_policy("rkv", **knobs).score(drawn.queries, drawn.keys, {"rkv_rank": ranks})
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        of_window = {name: knobs[name] for name in knobs.keys() - {"kernel_size", "pooling"}}
        expected = [
            *reference.rkv(keys, queries, **knobs),
            *reference.rkv_window(keys, queries, **of_window),
        ]
        torch.testing.assert_close(
            scores[b, h].double(), torch.tensor(expected).double(), atol=ATOL, rtol=0
        )


@given(st.data(), knobs(max_window=4))
def test_every_round_of_a_stream_scores_the_resident_rows(data: st.DataObject, knobs: dict) -> None:
    window = knobs["window_size"]
    drawn = data.draw(caches(min_rows=window + 1, max_rows=28))
    budget = data.draw(st.integers(window, drawn.num_rows - 1))
    plan = data.draw(rounds(drawn.num_rows))
    answer = replay("rkv", drawn.keys, drawn.values, drawn.queries, budget=budget, **plan, **knobs)
    score = partial(reference.rkv, **knobs)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        ours = [kept[b, h].tolist() for kept in answer]
        follow_stream(keys, queries, ours, plan["compact_at"], score, window=window, budget=budget)


@given(caches(min_rows=13))
def test_lambda_one_uses_importance_only(drawn: Drawn) -> None:
    inputs = (drawn.keys, drawn.values, drawn.queries)
    kept = keep_rows("rkv", *inputs, budget=12, mix_lambda=1.0)
    assert (kept == keep_rows("snapkv", *inputs, budget=12)).all()


@given(caches(min_rows=13))
def test_lambda_zero_ignores_queries(drawn: Drawn) -> None:
    kept = keep_rows("rkv", drawn.keys, drawn.values, drawn.queries, budget=12, mix_lambda=0)
    others = torch.zeros_like(drawn.queries)
    assert (
        kept == keep_rows("rkv", drawn.keys, drawn.values, others, budget=12, mix_lambda=0)
    ).all()


def test_newest_of_equal_keys_is_kept() -> None:
    # Rows 5, 9 and 14 have equal keys, all others are orthogonal. With uniform attention, only
    # the newest of the three is not redundant.
    keys = torch.eye(24)[None, None].clone()
    keys[:, :, 9] = keys[:, :, 14] = keys[:, :, 5]
    queries = torch.zeros(1, 1, 8, 24)
    kept = keep_rows("rkv", keys, keys, queries, budget=22, mix_lambda=0.1)
    assert sorted(set(range(24)) - set(kept.flatten().tolist())) == [5, 9]


@given(caches(min_rows=13))
def test_window_is_kept(drawn: Drawn) -> None:
    kept = keep_rows("rkv", drawn.keys, drawn.values, drawn.queries, budget=12)
    assert (kept[:, :, -8:] == torch.arange(drawn.num_rows - 8, drawn.num_rows)).all()


@given(caches(min_rows=9))
def test_budget_of_one_window_is_a_sliding_window(drawn: Drawn) -> None:
    kept = keep_rows("rkv", drawn.keys, drawn.values, drawn.queries, budget=8)
    assert (kept == torch.arange(drawn.num_rows - 8, drawn.num_rows)).all()


def test_keys_of_length_zero_give_finite_scores() -> None:
    keys = torch.zeros(1, 2, 20, 4)
    queries = torch.ones(1, 2, 8, 4)
    kept = keep_rows("rkv", keys, keys, queries, budget=12)
    assert_rows_shape(kept, keys, 12)


def test_budget_below_the_window_raises() -> None:
    keys = torch.zeros(1, 1, 20, 2)
    with pytest.raises(BudgetError, match="rkv"):
        keep_rows("rkv", keys, keys, keys, budget=7)
