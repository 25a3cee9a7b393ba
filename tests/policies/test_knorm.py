"""Knorm against loops over the keys: it keeps the shortest keys and the newest rows."""

import reference
import torch
from compare import assert_best_rows, assert_rows_shape, heads
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, rounds

from kvpolicy import load_policy
from kvpolicy.testing import keep_rows, replay


@given(st.data(), caches(num_queries=1))
def test_keeps_the_shortest_keys_and_the_newest_rows(data: st.DataObject, drawn: Drawn) -> None:
    n_recent = data.draw(st.integers(0, 6))
    budget = data.draw(budgets(drawn.num_rows, min_budget=max(n_recent, 1)))
    kept = keep_rows(
        "knorm", drawn.keys, drawn.values, drawn.queries, budget=budget, n_recent=n_recent
    )
    assert_rows_shape(kept, drawn.keys, budget)
    window = min(n_recent, drawn.num_rows)
    for b, h, keys, _ in heads(drawn.keys, drawn.queries):
        scores = reference.knorm(keys)[: drawn.num_rows - window]
        assert_best_rows(kept[b, h].tolist(), scores, window=window, budget=budget)


@given(st.data(), caches(min_rows=2, max_rows=24))
def test_stream_without_recent_rows_keeps_the_shortest_keys(
    data: st.DataObject, drawn: Drawn
) -> None:
    # Norms do not change, so intermediate rounds make no difference: an evicted key was longer
    # than the kept ones and would also be evicted later.
    budget = data.draw(st.integers(1, drawn.num_rows - 1))
    plan = data.draw(rounds(drawn.num_rows))
    plan["compact_at"] = sorted({*plan["compact_at"], drawn.num_rows})
    inputs = (drawn.keys, drawn.values, drawn.queries)
    answer = replay("knorm", *inputs, budget=budget, n_recent=0, **plan)
    assert (answer[-1] == keep_rows("knorm", *inputs, budget=budget, n_recent=0)).all()


def score(layer_idx: int, **knobs: object) -> torch.Tensor | None:
    keys = torch.randn(1, 2, 10, 4, generator=torch.Generator().manual_seed(0))
    return load_policy("knorm", **knobs).score_some_layers(layer_idx=layer_idx, keys=keys)


def test_score_is_none_only_in_skipped_layers() -> None:
    assert [score(layer, skip_layers=[0, 2]) is None for layer in range(4)] == [
        True,
        False,
        True,
        False,
    ]


def test_skipped_layers_use_the_previous_policy() -> None:
    rng = torch.Generator().manual_seed(3)
    keys = torch.randn(1, 2, 30, 4, generator=rng)
    skipping = load_policy("knorm", skip_layers=(0,))  # keep_rows uses layer 0
    kept = keep_rows(["streaming", skipping], keys, keys, keys, budget=12)
    assert (kept == keep_rows("streaming", keys, keys, keys, budget=12)).all()
    alone = keep_rows(skipping, keys, keys, keys, budget=12)
    assert (alone == torch.arange(18, 30)).all(), "without another policy the newest rows are kept"
