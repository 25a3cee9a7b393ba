"""StreamingLLM against its definition: sinks, newest rows, nothing else."""

import pytest
import reference
import torch
from compare import assert_rows_shape
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, rounds

from kvpolicy.errors import BudgetError
from kvpolicy.testing import keep_rows, replay


@given(st.data(), caches(num_queries=1))
def test_keeps_the_first_and_the_newest_rows(data: st.DataObject, drawn: Drawn) -> None:
    n_sink = data.draw(st.integers(0, 6))
    budget = data.draw(budgets(drawn.num_rows, min_budget=n_sink + 1))
    kept = keep_rows(
        "streaming", drawn.keys, drawn.values, drawn.queries, budget=budget, n_sink=n_sink
    )
    assert_rows_shape(kept, drawn.keys, budget)
    expected = reference.streaming(drawn.num_rows, budget, n_sink)
    assert (kept == torch.tensor(expected)).all()


@given(st.data(), caches(min_rows=2))
def test_stream_keeps_the_first_and_the_newest_tokens(data: st.DataObject, drawn: Drawn) -> None:
    n_sink = data.draw(st.integers(0, 5))
    budget = data.draw(budgets(drawn.num_rows, min_budget=n_sink + 1))
    plan = data.draw(rounds(drawn.num_rows))
    answer = replay(
        "streaming", drawn.keys, drawn.values, drawn.queries, budget=budget, n_sink=n_sink, **plan
    )
    # Evicted tokens do not return; the result equals one compaction, as long as no round is
    # skipped because the sequence is within its budget.
    resident: list[int] = []
    seen = 0
    for kept, count in zip(answer, plan["compact_at"], strict=True):
        resident += range(seen, count)
        seen = count
        resident = [resident[t] for t in reference.streaming(len(resident), budget, n_sink)]
        assert (kept == torch.tensor(resident)).all()


@given(caches(num_queries=1, min_rows=6))
def test_without_sinks_only_the_newest_rows_are_kept(drawn: Drawn) -> None:
    kept = keep_rows("streaming", drawn.keys, drawn.values, drawn.queries, budget=5, n_sink=0)
    newest = torch.arange(drawn.num_rows - 5, drawn.num_rows)
    assert (kept == newest).all()


def test_four_sinks_are_the_default() -> None:
    keys = torch.zeros(1, 1, 20, 2)
    kept = keep_rows("streaming", keys, keys, keys[:, :, :1], budget=6)
    assert kept.flatten().tolist() == [0, 1, 2, 3, 18, 19]


@given(st.data(), caches(num_queries=1))
def test_keys_and_values_do_not_matter(data: st.DataObject, drawn: Drawn) -> None:
    budget = data.draw(budgets(drawn.num_rows, min_budget=5))
    kept = keep_rows("streaming", drawn.keys, drawn.values, drawn.queries, budget=budget)
    blank = torch.zeros_like(drawn.keys)
    assert (kept == keep_rows("streaming", blank, blank, drawn.queries, budget=budget)).all()


def test_budget_below_the_sinks_raises() -> None:
    keys = torch.zeros(1, 1, 20, 2)
    with pytest.raises(BudgetError, match="streaming"):
        keep_rows("streaming", keys, keys, keys[:, :, :1], budget=3, n_sink=4)
