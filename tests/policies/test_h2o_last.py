"""The "H2O" of R-KV's code against loops over its last query."""

import reference
import torch
from compare import assert_best_rows, assert_rows_shape, follow_stream, heads
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, rounds

from kvpolicy.testing import keep_rows, replay


@given(st.data(), caches())
def test_keeps_rows_attended_by_the_last_query_and_its_own_row(
    data: st.DataObject, drawn: Drawn
) -> None:
    budget = data.draw(budgets(drawn.num_rows))
    kept = keep_rows("h2o_last", drawn.keys, drawn.values, drawn.queries, budget=budget)
    assert_rows_shape(kept, drawn.keys, budget)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        scores = reference.last_query(keys, queries)
        assert_best_rows(kept[b, h].tolist(), scores, window=1, budget=budget)


@given(st.data(), caches(min_rows=2, max_rows=24))
def test_scores_do_not_accumulate_between_rounds(data: st.DataObject, drawn: Drawn) -> None:
    budget = data.draw(st.integers(1, drawn.num_rows - 1))
    plan = data.draw(rounds(drawn.num_rows))
    answer = replay("h2o_last", drawn.keys, drawn.values, drawn.queries, budget=budget, **plan)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        ours = [kept[b, h].tolist() for kept in answer]
        follow_stream(
            keys,
            queries,
            ours,
            plan["compact_at"],
            reference.last_query,
            window=1,
            budget=budget,
        )


@given(st.data(), caches(min_rows=2))
def test_equals_snapkv_with_window_one_and_no_pooling(data: st.DataObject, drawn: Drawn) -> None:
    budget = data.draw(st.integers(1, drawn.num_rows))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    kept = keep_rows("h2o_last", *inputs, budget=budget)
    snapkv = keep_rows("snapkv", *inputs, budget=budget, window_size=1, kernel_size=1)
    assert (kept == snapkv).all()


def test_differs_from_h2o() -> None:
    keys = torch.zeros(1, 1, 20, 2)
    keys[:, :, 3, 0] = keys[:, :, 5, 1] = 9.0
    queries = torch.zeros(1, 1, 20, 2)
    queries[:, :, :-1, 0] = queries[:, :, -1, 1] = 9.0  # all attend to row 3, the last to row 5
    assert 5 in keep_rows("h2o_last", keys, keys, queries, budget=2).flatten().tolist()
    assert 3 in keep_rows("h2o", keys, keys, queries, budget=2, n_recent=1).flatten().tolist()
