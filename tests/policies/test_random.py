"""Random against integer loops, and statistical tests of its scores."""

import reference
import tiny
import torch
from compare import assert_best_rows, assert_rows_shape
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, rounds

from kvpolicy import Engine, Plan, load_policy
from kvpolicy.testing import keep_rows, replay

seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.integers(0, 200), st.integers(0, 2**20))
def test_scores_equal_the_reference(seed: int, layer_idx: int, first: int) -> None:
    positions = torch.arange(first, first + 9).expand(2, 3, -1)
    scores = load_policy("random", seed=seed).score(layer_idx=layer_idx, positions=positions)
    expected = [
        [reference.lot(seed, layer_idx, head, position) for position in range(first, first + 9)]
        for head in range(3)
    ]
    assert scores.tolist() == [expected, expected]


@given(st.data(), seeds, caches(num_queries=1))
def test_keeps_the_highest_scores(data: st.DataObject, seed: int, drawn: Drawn) -> None:
    budget = data.draw(budgets(drawn.num_rows))
    kept = keep_rows("random", drawn.keys, drawn.values, drawn.queries, budget=budget, seed=seed)
    assert_rows_shape(kept, drawn.keys, budget)
    for head in range(drawn.keys.shape[1]):
        scores = [reference.lot(seed, 0, head, t) for t in range(drawn.num_rows)]
        assert_best_rows(kept[0, head].tolist(), scores, budget=budget, atol=0)


@given(st.data(), caches(min_rows=2, max_rows=24))
def test_kept_rows_do_not_depend_on_the_compaction_schedule(
    data: st.DataObject, drawn: Drawn
) -> None:
    budget = data.draw(st.integers(1, drawn.num_rows - 1))
    plan = data.draw(rounds(drawn.num_rows))
    plan["compact_at"] = sorted({*plan["compact_at"], drawn.num_rows})
    inputs = (drawn.keys, drawn.values, drawn.queries)
    answer = replay("random", *inputs, budget=budget, **plan)
    assert (answer[-1] == keep_rows("random", *inputs, budget=budget)).all()


def test_scores_are_uniform_and_uncorrelated_between_seeds_layers_and_heads() -> None:
    positions = torch.arange(20_000).expand(1, 4, -1)
    drawn = torch.cat(
        [
            load_policy("random", seed=seed).score(layer_idx=layer, positions=positions)[0]
            for seed in (0, 1)
            for layer in (0, 1)
        ]
    )  # 16 streams
    # Limits: 5 standard deviations of the mean, of a decile count and of a correlation.
    n = positions.shape[2]
    assert ((drawn.mean(dim=1) - 0.5).abs() < 5 / (12 * n) ** 0.5).all()
    counts = torch.stack([stream.histc(10, 0, 1) for stream in drawn])
    assert ((counts - n / 10).abs() < 5 * (0.09 * n) ** 0.5).all()
    correlation = drawn.double().corrcoef() - torch.eye(len(drawn))
    assert (correlation.abs() < 5 / n**0.5).all()
    autocorrelation = torch.stack([drawn[0, :-1], drawn[0, 1:]]).corrcoef()[0, 1]
    assert abs(float(autocorrelation)) < 5 / n**0.5, "adjacent positions are correlated"


def test_tokens_do_not_depend_on_the_number_of_slots() -> None:
    plan = Plan.uniform("random", "protect", budget=16, buffer=4)
    prompts = [[1, 2, 3] * 6, [4, 5, 6, 7] * 3, [8, 9] * 10]
    batched = Engine(tiny.shared_model(), None, plan, slots=3)
    alone = Engine(tiny.shared_model(), None, plan, slots=1)
    tokens = [
        {one.id: one.tokens for one in engine.generate(prompts, max_new_tokens=30).results()}
        for engine in (batched, alone)
    ]
    assert tokens[0] == tokens[1]
