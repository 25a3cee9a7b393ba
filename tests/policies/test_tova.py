"""TOVA against loops over the newest query of every head."""

import pytest
import reference
import tiny
import torch
from compare import assert_best_rows, assert_rows_shape, layers
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, rounds

from kvpolicy import Engine, Plan
from kvpolicy.testing import keep_rows, replay


@given(st.data(), caches())
def test_all_heads_keep_the_rows_attended_by_the_newest_query(
    data: st.DataObject, drawn: Drawn
) -> None:
    n_recent = data.draw(st.integers(0, 3))
    budget = data.draw(budgets(drawn.num_rows, min_budget=max(n_recent, 1)))
    kept = keep_rows(
        "tova", drawn.keys, drawn.values, drawn.queries, budget=budget, n_recent=n_recent
    )
    assert_rows_shape(kept, drawn.keys, budget)
    assert (kept == kept[:, :1]).all(), "KV heads keep different rows"
    window = min(n_recent, drawn.num_rows)
    for b, keys, queries in layers(drawn.keys, drawn.queries):
        scores = reference.tova(keys, queries)[: drawn.num_rows - window]
        assert_best_rows(kept[b, 0].tolist(), scores, window=window, budget=budget)


@given(st.data(), caches(min_rows=2, max_rows=20))
def test_every_round_of_a_stream_uses_the_newest_query(data: st.DataObject, drawn: Drawn) -> None:
    budget = data.draw(st.integers(1, drawn.num_rows - 1))
    plan = data.draw(rounds(drawn.num_rows))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    answer = replay("tova", *inputs, budget=budget, **plan)
    for b, keys, queries in layers(drawn.keys, drawn.queries):
        resident: list[int] = []
        seen = 0
        for kept, count in zip(answer, plan["compact_at"], strict=True):
            resident += range(seen, count)
            seen = count
            scores = reference.tova(
                [[head[t] for t in resident] for head in keys],
                [[head[:count] for head in group] for group in queries],
            )
            ours = kept[b, 0].tolist()
            rows = [resident.index(position) for position in ours]
            assert_best_rows(rows, scores, budget=budget)
            resident = ours


@given(caches(min_rows=14))
def test_older_queries_do_not_matter(drawn: Drawn) -> None:
    kept = keep_rows("tova", drawn.keys, drawn.values, drawn.queries, budget=12)
    last = drawn.queries[:, :, -1:]
    assert (kept == keep_rows("tova", drawn.keys, drawn.values, last, budget=12)).all()


def test_newest_row_may_be_evicted_unless_protected() -> None:
    keys = torch.ones(1, 2, 10, 4)
    keys[:, :, -1] = -5.0
    queries = torch.ones(1, 4, 1, 4)
    kept = keep_rows("tova", keys, keys, queries, budget=4)
    assert kept[0, 0].tolist() == [5, 6, 7, 8]
    kept = keep_rows("tova", keys, keys, queries, budget=4, n_recent=1)
    assert kept[0, 0].tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize(("every", "most"), [(1, 13), (3, 15), (None, 20)])
def test_compaction_happens_every_n_tokens(every: int | None, most: int) -> None:
    plan = Plan.uniform("tova", budget=12, buffer=8, knobs={"tova": {"every": every}})
    engine = Engine(tiny.shared_model(), None, plan, slots=1)
    (result,) = engine.generate([[1, 2, 3]], max_new_tokens=40).results()
    assert result.peak_rows == most
    assert result.compactions
