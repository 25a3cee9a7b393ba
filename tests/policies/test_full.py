"""The full cache keeps every row under any budget."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, caches, rounds

from kvpolicy.testing import keep_rows, replay


@given(caches(), st.integers(1, 40))
def test_full_keeps_every_row_under_any_budget(drawn: Drawn, budget: int) -> None:
    kept = keep_rows("full", drawn.keys, drawn.values, drawn.queries, budget=budget)
    assert kept.shape == drawn.keys.shape[:3]
    assert (kept == torch.arange(drawn.num_rows)).all()


@given(st.data(), caches(min_rows=2))
def test_full_keeps_every_token_of_a_stream(data: st.DataObject, drawn: Drawn) -> None:
    plan = data.draw(rounds(drawn.num_rows))
    answer = replay("full", drawn.keys, drawn.values, drawn.queries, budget=1, **plan)
    for kept, count in zip(answer, plan["compact_at"], strict=True):
        assert (kept == torch.arange(count)).all()
