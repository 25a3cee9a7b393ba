"""PyramidKV: SnapKV's rows, with budgets that decrease with depth and sum to the total."""

from functools import partial

import pytest
import reference
import torch
from compare import assert_best_rows, assert_rows_shape, follow_stream, heads
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_baselines.pyramidkv import published_budgets
from strategies import Drawn, budgets, caches, rounds

from kvpolicy import Plan
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.testing import keep_rows, replay


def layer_budgets(plan: Plan, num_layers: int) -> list[int]:
    found = [layer.budget for layer in plan.resolve(num_layers).layers]
    assert None not in found
    return found


@given(
    st.integers(1, 80),
    st.integers(1, 5000),
    st.integers(1, 64),
    st.floats(1, 40) | st.sampled_from([1, 20]),
)
def test_budgets_decrease_in_even_steps_with_an_exact_mean(
    num_layers: int, spare: int, window: int, beta: float
) -> None:
    budget = window + spare
    knobs = {"pyramidkv": {"window_size": window, "beta": beta}}
    found = layer_budgets(Plan.uniform("pyramidkv", budget=budget, knobs=knobs), num_layers)
    assert sum(found) == budget * num_layers
    assert found == sorted(found, reverse=True)
    if num_layers > 1:
        for rows, expected in zip(
            found, reference.pyramid(num_layers, budget, window, beta), strict=True
        ):
            assert abs(rows - expected) < 1 + 1e-6


def test_layer_groups_have_pyramid_steps_around_their_own_mean() -> None:
    stack = (PolicySpec("pyramidkv", {"window_size": 8}),)
    plan = Plan(
        stack, layers=(LayerGroup("0:4", budget=108), LayerGroup("4:", budget=208)), buffer=8
    )
    lower, upper = layer_budgets(plan, 8)[:4], layer_budgets(plan, 8)[4:]
    assert sum(lower) == 4 * 108
    assert sum(upper) == 4 * 208
    assert lower == sorted(lower, reverse=True)
    assert upper == sorted(upper, reverse=True)
    # Rows beyond the window have the proportions of the pyramid of the whole model.
    steps = [rows - 8 for rows in reference.pyramid(8, 108, 8, 20)]
    for rows, step in zip(lower, steps[:4], strict=True):
        assert abs(rows - 8 - 400 * step / sum(steps[:4])) < 1


def test_beta_one_gives_equal_budgets() -> None:
    assert (
        layer_budgets(Plan.uniform("pyramidkv", budget=64, knobs={"pyramidkv": {"beta": 1}}), 6)
        == [64] * 6
    )


@given(st.integers(2, 40), st.integers(0, 400), st.integers(1, 32), st.integers(0, 9000))
def test_published_budgets_sum_to_at_least_the_capacity(
    num_layers: int, spare: int, window: int, num_rows: int
) -> None:
    capacity = window + spare
    found = published_budgets(capacity, window, num_rows, num_layers)
    assert found == sorted(found, reverse=True)
    if num_rows >= capacity:
        assert sum(found) >= capacity * num_layers
        assert max(found) <= max(num_rows, capacity)


@pytest.mark.parametrize("num_layers", [28, 32])
def test_budgets_for_long_prompts_differ_from_published_ones_by_rounding(
    num_layers: int,
) -> None:
    ours = layer_budgets(Plan.uniform("pyramidkv", budget=1024), num_layers)
    theirs = published_budgets(1024, 8, 100_000, num_layers)
    # Rounding down removes less than one row per step, and these add up in the last layer.
    assert all(0 <= b - a + 1 < num_layers for a, b in zip(ours, theirs, strict=True))
    assert abs(ours[0] - theirs[0]) <= 1


@given(st.data(), caches(min_rows=5))
def test_decode_phase_keeps_the_rows_of_the_reference(data: st.DataObject, drawn: Drawn) -> None:
    budget = data.draw(budgets(drawn.num_rows, min_budget=4))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    kept = keep_rows("pyramidkv", *inputs, budget=budget, window_size=4)
    assert_rows_shape(kept, drawn.keys, budget)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        scores = reference.snapkv(keys, queries, window_size=4)
        assert_best_rows(kept[b, h].tolist(), scores, window=4, budget=budget)


@given(st.data(), caches(min_rows=5), st.sampled_from(["mean", "max", "sum"]))
def test_published_form_keeps_the_rows_of_the_reference(
    data: st.DataObject, drawn: Drawn, group_reduce: str
) -> None:
    budget = data.draw(budgets(drawn.num_rows, min_budget=4))
    knobs = {"window_size": 4, "kernel_size": 5, "group_reduce": group_reduce}
    inputs = (drawn.keys, drawn.values, drawn.queries)
    kept = keep_rows("pyramidkv", *inputs, budget=budget, phase="prefill", **knobs)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        scores = reference.snapkv_published(keys, queries, **knobs)
        assert_best_rows(kept[b, h].tolist(), scores, window=4, budget=budget)


@given(st.data(), caches(min_rows=5, max_rows=28))
def test_every_round_of_a_stream_uses_the_newest_queries(data: st.DataObject, drawn: Drawn) -> None:
    budget = data.draw(st.integers(4, drawn.num_rows - 1))
    plan = data.draw(rounds(drawn.num_rows))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    answer = replay("pyramidkv", *inputs, budget=budget, window_size=4, **plan)
    score = partial(reference.snapkv, window_size=4)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        ours = [kept[b, h].tolist() for kept in answer]
        follow_stream(keys, queries, ours, plan["compact_at"], score, window=4, budget=budget)


def test_before_another_policy_only_sets_budgets() -> None:
    alone = layer_budgets(Plan.uniform("pyramidkv", budget=64), 4)
    assert layer_budgets(Plan.uniform("pyramidkv", "rkv", budget=64), 4) == alone
    keys = torch.randn(1, 2, 40, 4, generator=torch.Generator().manual_seed(1))
    kept = keep_rows(["pyramidkv", "rkv"], keys, keys, keys, budget=20)
    assert (kept == keep_rows("rkv", keys, keys, keys, budget=20)).all()
