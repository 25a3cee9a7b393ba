"""Protect pins sinks and recent rows under any score."""

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import Compaction, Recorder, Scores
from strategies import Drawn, budgets, caches, costly
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan
from kvpolicy.errors import BudgetError
from kvpolicy.testing import keep_rows


@given(st.data(), caches(num_queries=1))
def test_protect_alone_keeps_sinks_and_newest_rows(data: st.DataObject, drawn: Drawn) -> None:
    n_sink, n_recent = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    n_recent = n_recent if n_sink else max(n_recent, 1)  # without either nothing is chosen
    budget = data.draw(budgets(drawn.num_rows, min_budget=n_sink + n_recent))
    kept = keep_rows(
        "protect",
        drawn.keys,
        drawn.values,
        drawn.queries,
        budget=budget,
        n_sink=n_sink,
        n_recent=n_recent,
    )
    expected = reference.streaming(drawn.num_rows, budget, n_sink)
    assert (kept == torch.tensor(expected)).all()


def oldest_first(positions: Tensor) -> Tensor:
    """The worst case for recent rows: older rows score higher, the newest has -inf."""
    scores = -positions.float()
    scores[:, :, -1] = -torch.inf
    return scores


def newest_first(positions: Tensor) -> Tensor:
    """The worst case for sinks."""
    return positions.float()


def all_pinned(positions: Tensor) -> Tensor:
    """A policy that wants every row to stay."""
    return torch.full(positions.shape, torch.inf)


def compactions_of(*stack: object, budget: int, **knobs: int) -> list[Compaction]:
    """All compactions of one layer while three sequences are decoded."""
    recorder = Recorder()
    plan = Plan.uniform(
        *stack, "protect", recorder, budget=budget, buffer=3, knobs={"protect": knobs}
    )
    prompts = [[4], [1, 2, 3] * 5, [7] * 30]
    engine = Engine(shared_model(num_layers=1), plan=plan, slots=2)
    engine.generate(prompts, max_new_tokens=20).results()
    compactions = [one for record in recorder.records for one in record.compactions]
    assert len(compactions) > 10
    return compactions


@costly
@given(
    st.sampled_from([oldest_first, newest_first, all_pinned]), st.integers(0, 5), st.integers(0, 5)
)
def test_protected_tokens_are_kept_under_any_score(
    score: object, n_sink: int, n_recent: int
) -> None:
    budget = n_sink + n_recent + 2
    for one in compactions_of(Scores(score), budget=budget, n_sink=n_sink, n_recent=n_recent):
        for kept in one.kept.tolist():
            assert set(range(n_sink)) <= set(kept)
            assert set(range(one.seq_len - n_recent, one.seq_len)) <= set(kept)


@given(st.sampled_from(["h2o", "streaming"]))
def test_sinks_are_the_first_tokens_after_several_compactions(name: str) -> None:
    for one in compactions_of(name, budget=8, n_sink=3, n_recent=2):
        for kept in one.kept.tolist():
            assert {0, 1, 2, one.seq_len - 2, one.seq_len - 1} <= set(kept)


def test_unprotected_rows_are_ranked_by_the_wrapped_score() -> None:
    for one in compactions_of(Scores(oldest_first), budget=9, n_sink=2, n_recent=3):
        between = one.positions[0].tolist()[2:-3]
        expected = [0, 1, *between[:4], *range(one.seq_len - 3, one.seq_len)]
        assert one.kept.tolist() == [expected] * 2


def test_budget_below_the_protected_rows_raises() -> None:
    keys = torch.zeros(1, 1, 20, 2)
    with pytest.raises(BudgetError, match="protect"):
        keep_rows("protect", keys, keys, keys[:, :, :1], budget=11)
