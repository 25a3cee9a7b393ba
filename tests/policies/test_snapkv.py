"""SnapKV, in decoding and as published, against loops over its window."""

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
        "window_size": draw(st.integers(1, max_window)),
        "kernel_size": draw(st.sampled_from([1, 3, 5, 7])),
        "pooling": draw(st.sampled_from(["maxpool", "avgpool"])),
    }


@given(st.data(), knobs())
def test_decode_phase_keeps_the_rows_of_the_reference(data: st.DataObject, knobs: dict) -> None:
    window = knobs["window_size"]
    drawn = data.draw(caches(min_rows=window + 1))
    budget = data.draw(budgets(drawn.num_rows, min_budget=window))
    kept = keep_rows("snapkv", drawn.keys, drawn.values, drawn.queries, budget=budget, **knobs)
    assert_rows_shape(kept, drawn.keys, budget)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        scores = reference.snapkv(keys, queries, **knobs)
        assert_best_rows(kept[b, h].tolist(), scores, window=window, budget=budget)


@given(st.data(), knobs(), st.sampled_from(["mean", "max", "sum"]))
def test_published_form_keeps_the_rows_of_the_reference(
    data: st.DataObject, knobs: dict, group_reduce: str
) -> None:
    window = knobs["window_size"]
    knobs |= {"group_reduce": group_reduce}
    drawn = data.draw(caches(min_rows=window + 1))
    budget = data.draw(budgets(drawn.num_rows, min_budget=window))
    kept = keep_rows(
        "snapkv",
        drawn.keys,
        drawn.values,
        drawn.queries,
        budget=budget,
        phase="prefill",
        **knobs,
    )
    assert_rows_shape(kept, drawn.keys, budget)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        scores = reference.snapkv_published(keys, queries, **knobs)
        assert_best_rows(kept[b, h].tolist(), scores, window=window, budget=budget)


@given(st.data(), knobs(), st.sampled_from(["decode", "mean", "max", "sum"]))
def test_scores_equal_the_reference(data: st.DataObject, knobs: dict, form: str) -> None:
    window = knobs["window_size"]
    drawn = data.draw(caches(min_rows=window + 1))
    score = partial(reference.snapkv, **knobs)
    score_window = partial(reference.snapkv_window, window_size=window)
    if form != "decode":
        knobs |= {"phase": "prefill", "group_reduce": form}
        published = {name: knob for name, knob in knobs.items() if name != "phase"}
        score = partial(reference.snapkv_published, **published)
        score_window = partial(
            reference.snapkv_published_window, window_size=window, group_reduce=form
        )
    # There may be more queries than its window if another policy of the stack needs more.
    scores = load_policy("snapkv", **knobs).score(
        queries=drawn.queries,
        keys=drawn.keys,
        positions=torch.arange(drawn.num_rows).expand(drawn.keys.shape[:3]),
        seq_len=torch.tensor([drawn.num_rows] * len(drawn.keys)),
        tracks={"snapkv_rank": torch.zeros(drawn.keys.shape[:3])},
    )
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        expected = [*score(keys, queries), *score_window(keys, queries)]
        torch.testing.assert_close(
            scores[b, h].double(), torch.tensor(expected).double(), atol=10 * ATOL, rtol=0
        )


@given(st.data(), knobs(max_window=4))
def test_every_round_of_a_stream_uses_the_newest_queries(data: st.DataObject, knobs: dict) -> None:
    window = knobs["window_size"]
    drawn = data.draw(caches(min_rows=window + 1, max_rows=28))
    budget = data.draw(st.integers(window, drawn.num_rows - 1))
    plan = data.draw(rounds(drawn.num_rows))
    answer = replay(
        "snapkv", drawn.keys, drawn.values, drawn.queries, budget=budget, **plan, **knobs
    )
    score = partial(reference.snapkv, **knobs)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        ours = [kept[b, h].tolist() for kept in answer]
        follow_stream(keys, queries, ours, plan["compact_at"], score, window=window, budget=budget)


@given(caches(min_rows=13), st.sampled_from(["decode", "prefill"]))
def test_window_is_kept(drawn: Drawn, phase: str) -> None:
    kept = keep_rows("snapkv", drawn.keys, drawn.values, drawn.queries, budget=12, phase=phase)
    assert (kept[:, :, -8:] == torch.arange(drawn.num_rows - 8, drawn.num_rows)).all()


@given(caches(min_rows=9), st.sampled_from(["decode", "prefill"]))
def test_budget_of_one_window_is_a_sliding_window(drawn: Drawn, phase: str) -> None:
    kept = keep_rows("snapkv", drawn.keys, drawn.values, drawn.queries, budget=8, phase=phase)
    assert (kept == torch.arange(drawn.num_rows - 8, drawn.num_rows)).all()


@given(caches(min_rows=14))
def test_queries_before_the_window_do_not_matter(drawn: Drawn) -> None:
    last = drawn.queries[:, :, -8:]
    kept = keep_rows("snapkv", drawn.keys, drawn.values, drawn.queries, budget=12)
    assert (kept == keep_rows("snapkv", drawn.keys, drawn.values, last, budget=12)).all()


@given(caches(min_rows=14, num_kv_heads=2, group=1))
def test_phases_agree_on_one_query_without_groups_and_pooling(drawn: Drawn) -> None:
    plain = {"window_size": 1, "kernel_size": 1, "budget": 6}
    decode, prefill = (
        keep_rows("snapkv", drawn.keys, drawn.values, drawn.queries, phase=phase, **plain)
        for phase in ("decode", "prefill")
    )
    assert (decode == prefill).all()


def test_newest_rows_of_a_plateau_are_kept() -> None:
    # One peak, spread over seven rows by pooling; the budget keeps three of them.
    keys = torch.zeros(1, 1, 30, 4)
    keys[:, :, 10] = 5.0
    queries = torch.ones(1, 1, 8, 4)
    kept = keep_rows("snapkv", keys, keys, queries, budget=8 + 3)
    assert kept.flatten().tolist()[:3] == [11, 12, 13]


def test_budget_below_the_window_raises() -> None:
    keys = torch.zeros(1, 1, 20, 2)
    with pytest.raises(BudgetError, match="snapkv"):
        keep_rows("snapkv", keys, keys, keys, budget=7)
