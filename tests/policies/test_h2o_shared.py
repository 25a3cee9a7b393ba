"""The "H2O" of SkipKV's code against loops over the last query of every head."""

import reference
import torch
from compare import assert_best_rows, assert_rows_shape, layers
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches

from kvpolicy.testing import keep_rows, replay


@given(st.data(), caches())
def test_all_heads_keep_the_rows_attended_by_the_last_query(
    data: st.DataObject, drawn: Drawn
) -> None:
    budget = data.draw(budgets(drawn.num_rows))
    kept = keep_rows("h2o_shared", drawn.keys, drawn.values, drawn.queries, budget=budget)
    assert_rows_shape(kept, drawn.keys, budget)
    assert (kept == kept[:, :1]).all(), "KV heads keep different rows"
    for b, keys, queries in layers(drawn.keys, drawn.queries):
        scores = reference.last_query_of_all_heads(keys, queries)
        assert_best_rows(kept[b, 0].tolist(), scores, window=1, budget=budget)


@given(st.data(), caches(min_rows=2))
def test_one_kv_head_keeps_the_rows_of_h2o_last(data: st.DataObject, drawn: Drawn) -> None:
    budget = data.draw(st.integers(1, drawn.num_rows))
    group = drawn.queries.shape[1] // drawn.keys.shape[1]
    inputs = (drawn.keys[:, :1], drawn.values[:, :1], drawn.queries[:, :group])
    shared, alone = (keep_rows(name, *inputs, budget=budget) for name in ("h2o_shared", "h2o_last"))
    assert (shared == alone).all()


def test_nothing_accumulates() -> None:
    """Every query but the last attends to row 3, in both compactions; row 3 leaves."""
    keys = torch.zeros(1, 2, 20, 2)
    keys[:, :, 3, 0] = keys[:, :, 5, 1] = 9.0
    queries = torch.zeros(1, 2, 20, 2)
    queries[:, :, :, 0] = 9.0
    queries[:, :, [9, 19], 0], queries[:, :, [9, 19], 1] = 0.0, 9.0
    first, second = replay(
        "h2o_shared", keys, keys, queries, budget=2, prompt=10, compact_at=[10, 20]
    )
    assert first.tolist() == [[[5, 9]] * 2]
    assert second.tolist() == [[[5, 19]] * 2]
    assert 3 in keep_rows("h2o", keys, keys, queries, budget=2, n_recent=1).flatten().tolist()


def test_one_set_of_rows_serves_heads_that_attend_to_different_rows() -> None:
    """Head 0 attends to row 2 almost alone; row 6 is second in both heads, and is kept."""
    keys = torch.zeros(1, 2, 9, 1)
    keys[0, 0, [2, 6], 0] = torch.tensor([9.0, 8.9])
    keys[0, 1, [4, 6], 0] = torch.tensor([9.0, 8.9])
    queries = torch.ones(1, 2, 9, 1)
    shared = keep_rows("h2o_shared", keys, keys, queries, budget=2)
    assert shared.tolist() == [[[6, 8], [6, 8]]]
    alone = keep_rows("h2o_last", keys, keys, queries, budget=2)
    assert alone.tolist() == [[[2, 8], [4, 8]]]
