"""CAOTE against outputs that are computed with and without each row."""

import math
from typing import Any, ClassVar

import attrs
import pytest
import reference_caote as oracle
import torch
from compare import assert_best_rows
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from strategies import Drawn, caches, fill
from tiny import tiny_model
from torch import Tensor

from kvpolicy import CacheView, Engine, Plan, hookimpl, load_policy, select_rows
from kvpolicy.errors import KVPolicyError, PlanError
from kvpolicy.plan.spec import PolicySpec
from kvpolicy.testing import keep_rows


@attrs.define(eq=False)
class Masses:
    """Scores that are given, as a base."""

    gives_mass: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    masses: Tensor
    protects: tuple[int, int] = (0, 0)

    @hookimpl
    def score(self) -> Tensor:
        return self.masses


def changes_of(masses: Tensor, values: Tensor, **knobs: Any) -> Tensor:
    """Scores of CAOTE over given masses, ``[B, H_kv, T]``."""
    policy = load_policy("caote", **knobs)
    wrapper = policy.score(
        values=values,
        positions=torch.arange(masses.shape[2]).expand(masses.shape),
        protected=torch.zeros_like(masses, dtype=torch.bool),
        budget=masses.shape[2],
    )
    next(wrapper)
    with pytest.raises(StopIteration) as answer:
        wrapper.send(masses)
    scores: Tensor = answer.value.value
    return scores


def weights_of(drawn: Drawn) -> Tensor:
    """Softmax weights of the last query of each KV head's first query head, ``[B, H_kv, T]``."""
    group = drawn.queries.shape[1] // drawn.keys.shape[1]
    query = drawn.queries[:, ::group, -1:]
    return (query @ drawn.keys.mT * drawn.keys.shape[3] ** -0.5).softmax(dim=-1).squeeze(2)


@given(caches(min_rows=2))
def test_score_is_the_change_of_the_output_without_the_row(drawn: Drawn) -> None:
    weights = weights_of(drawn)
    assume(weights.max() < 0.99)  # then 1 - h loses digits in fp32
    scores = changes_of(weights, drawn.values)
    for b, h in torch.cartesian_prod(*map(torch.arange, weights.shape[:2])).tolist():
        given = weights[b, h].double().tolist(), drawn.values[b, h].double().tolist()
        expected = [oracle.change_without(*given, row) for row in range(drawn.num_rows)]
        close(scores[b, h], expected)


def close(scores: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(
        scores.double(), torch.tensor(expected).double(), rtol=1e-3, atol=2e-6
    )


@given(st.data(), caches(min_rows=3, num_kv_heads=1, group=1))
def test_over_tova_the_rows_stay_that_change_the_output_most(
    data: st.DataObject, drawn: Drawn
) -> None:
    budget = data.draw(st.integers(1, drawn.num_rows - 1))
    weights = weights_of(drawn)
    assume(weights.max() < 0.99)
    kept = keep_rows(["tova", "caote"], drawn.keys, drawn.values, drawn.queries, budget=budget)
    for b in range(len(kept)):
        given = weights[b, 0].double().tolist(), drawn.values[b, 0].double().tolist()
        changes = [oracle.change_without(*given, row) for row in range(drawn.num_rows)]
        assert_best_rows(kept[b, 0].tolist(), changes, budget=budget, atol=1e-4)


@given(caches(min_rows=2))
def test_fast_has_the_mean_of_the_values_for_the_output(drawn: Drawn) -> None:
    weights = weights_of(drawn)
    assume(weights.max() < 0.99)
    scores = changes_of(weights, drawn.values, fast=True)
    for b, h in torch.cartesian_prod(*map(torch.arange, weights.shape[:2])).tolist():
        given = weights[b, h].double().tolist(), drawn.values[b, h].double().tolist()
        close(scores[b, h], [oracle.fast_change(*given, row) for row in range(drawn.num_rows)])


def test_protected_rows_have_their_mass() -> None:
    """The score of a row that may leave is that of a sum with all rows in it."""
    masses, values = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), fill((1, 1, 4, 3), "gauss", 1)
    given = masses.flatten().tolist(), values[0, 0].double().tolist()
    changes = [oracle.change_without(*given, row) for row in range(4)]
    rows = CacheView(positions=torch.arange(4).view(1, 1, 4), values=values)
    for n_recent in (0, 1, 2):
        stack = [Masses(masses, (0, n_recent)), load_policy("caote")]
        (kept,) = select_rows(stack, rows, budget=3).keep.tolist()
        least = min(range(4 - n_recent), key=changes.__getitem__)
        assert kept == [[t for t in range(4) if t != least]]


@given(caches(min_rows=2), st.floats(1e-3, 1e3), st.booleans())
def test_scale_of_the_masses_does_not_matter(drawn: Drawn, scale: float, fast: bool) -> None:
    weights = weights_of(drawn)
    assume(weights.max() < 0.99)
    scores = changes_of(weights, drawn.values, fast=fast)
    scaled = changes_of(weights * scale, drawn.values, fast=fast)
    torch.testing.assert_close(scaled, scores, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_equal_values_leave_the_order_to_the_masses(fast: bool, value: float) -> None:
    masses = torch.rand(1, 2, 12, generator=torch.Generator().manual_seed(3))
    scores = changes_of(masses, torch.full((1, 2, 12, 4), value), fast=fast)
    assert torch.equal(scores.argsort(dim=2), masses.argsort(dim=2))


@given(st.integers(0, 100), st.integers(1, 8))
def test_a_row_with_the_value_of_the_output_leaves_first(seed: int, size: int) -> None:
    values = fill((1, 1, 9, size), "gauss", seed).double()
    masses = torch.rand(1, 1, 9, generator=torch.Generator().manual_seed(seed)) + 0.1
    masses[..., 4] = 0.9  # among the largest
    others = torch.arange(9) != 4
    mean = (masses[..., others, None] * values[:, :, others]).sum(2) / masses[..., others].sum()
    values[:, :, 4] = mean
    assert changes_of(masses, values.float()).argmin() == 4


@given(st.data(), caches(min_rows=3, max_rows=12), st.integers(0, 2))
def test_greedy_removes_one_row_after_the_other(
    data: st.DataObject, drawn: Drawn, n_recent: int
) -> None:
    budget = data.draw(st.integers(max(n_recent, 2), drawn.num_rows))
    masses = weights_of(drawn).clamp(min=1e-3)
    rows = CacheView(
        positions=torch.arange(drawn.num_rows).expand(masses.shape), values=drawn.values
    )
    stack = [Masses(masses, (0, n_recent)), load_policy("caote", greedy=True)]
    kept = select_rows(stack, rows, budget=budget).keep
    for b, h in torch.cartesian_prod(*map(torch.arange, masses.shape[:2])).tolist():
        given = masses[b, h].double().tolist(), drawn.values[b, h].double().tolist()
        may_leave = [t < drawn.num_rows - n_recent for t in range(drawn.num_rows)]
        expected = oracle.one_by_one(*given, may_leave, budget)
        mine = kept[b, h].tolist()
        if mine != expected:  # rounding of almost equal changes
            assert math.isclose(
                joint_change(*given, mine), joint_change(*given, expected), rel_tol=0.05
            )


def joint_change(masses: list[float], values: list, kept: list[int]) -> float:
    """Length of the change of the output if only these rows stay."""
    after = oracle.output([masses[t] for t in kept], [values[t] for t in kept])
    return math.dist(oracle.output(masses, values), after)


def test_fast_ranks_rows_almost_as_the_output_does() -> None:
    keys, values, queries = (fill((1, 4, 128, 16), "gauss", seed) for seed in (1, 2, 3))
    weights = (queries @ keys.mT / 4).softmax(dim=-1).sum(dim=2)
    full, fast = (changes_of(weights, values, fast=one) for one in (False, True))
    for head in range(4):
        assert spearmanr(full[0, head], fast[0, head]).statistic > 0.8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fast", [False, True])
def test_half_precision_works(dtype: torch.dtype, fast: bool) -> None:
    values = fill((2, 2, 24, 8), "gauss", 1, 3000).to(dtype)
    keys = fill((2, 2, 24, 8), "gauss", 2).to(dtype)
    queries = fill((2, 4, 24, 8), "gauss", 3).to(dtype)
    stack = [PolicySpec("h2o", {"n_recent": 2}), PolicySpec("caote", {"fast": fast})]
    kept = keep_rows(stack, keys, values, queries, budget=9)
    upcast = [tensor.float() for tensor in (keys, values, queries)]
    assert torch.equal(kept, keep_rows(stack, *upcast, budget=9))


def test_a_row_with_all_of_the_mass_has_a_finite_score() -> None:
    masses = torch.tensor([[[0.0, 5.0, 0.0]]])
    scores = changes_of(masses, fill((1, 1, 3, 4), "gauss", 1))
    assert scores.isfinite().all()
    assert (changes_of(torch.zeros(1, 1, 3), fill((1, 1, 3, 4), "gauss", 1)) == 0).all()


# What it refuses

MASSES = ["h2o", "h2o_last", "h2o_shared", "tova", "snapkv", "pyramidkv", "laq"]
OTHERS = [
    "streaming",
    "knorm",
    "rkv",
    "random",
    "obcache",
    "obcache_history",
    "mix",
    "skipkv",
    "caote",
]


@pytest.mark.parametrize("base", MASSES)
def test_bases_whose_scores_are_masses_are_welcome(base: str) -> None:
    Plan.uniform(base, "caote", budget=64, buffer=8).resolve(2)


def test_saliencies_that_are_attention_are_masses() -> None:
    attention = PolicySpec("obcache", {"saliency": "attention"})
    Plan.uniform(attention, "caote", budget=64, buffer=8).resolve(2)


@pytest.mark.parametrize("base", OTHERS)
def test_other_bases_are_refused_when_the_plan_is_resolved(base: str) -> None:
    with pytest.raises(PlanError, match="caote") as caught:
        Plan.uniform(base, "caote", budget=64, buffer=8).resolve(2)
    assert base in str(caught.value)


@pytest.mark.parametrize("stack", [["caote"], ["protect", "caote"]])
def test_no_base_is_refused(stack: list[str]) -> None:
    with pytest.raises(PlanError, match="caote"):
        Plan.uniform(*stack, budget=64, buffer=8).resolve(2)
    keys = fill((1, 1, 20, 4), "gauss", 1)
    with pytest.raises(KVPolicyError, match="caote"):
        keep_rows(stack, keys, keys, keys, budget=16)
    with pytest.raises(KVPolicyError, match="caote"):
        select_rows(stack, CacheView(positions=torch.arange(20).view(1, 1, 20)), budget=16)


def test_wrappers_in_between_must_give_masses_too() -> None:
    with pytest.raises(PlanError, match="caote#2"):
        Plan.uniform("h2o", "caote", PolicySpec("caote"), budget=64, buffer=8).resolve(2)


def test_a_part_without_a_base_is_refused() -> None:
    mix = PolicySpec("mix", {"of": ["h2o", "caote"]})
    with pytest.raises(PlanError, match="'caote' in 'mix'"):
        Plan.uniform(mix, budget=64, buffer=8).resolve(2)


def test_greedy_is_refused_where_heads_share_rows() -> None:
    greedy = PolicySpec("caote", {"greedy": True})
    with pytest.raises(PlanError, match=r"'caote'.*ragged"):
        Plan.uniform("h2o", greedy, budget=64, buffer=8, heads="shared").resolve(2)


# The composition from a file


def test_plan_h2o_caote_ragged_runs_and_heads_hold_different_numbers_of_rows() -> None:
    plan = attrs.evolve(Plan.load("h2o-caote-ragged"), budget=24, buffer=4)
    assert [spec.policy for spec in plan.stack] == ["h2o", "caote", "adakv"]
    model = tiny_model(num_kv_heads=2, num_heads=4)
    engine = Engine(model, plan=plan)
    prompts = [[(7 * i + j * j) % 61 for j in range(50)] for i in range(2)]
    for result in engine.generate(prompts, max_new_tokens=30, stop_ids=()).results():
        assert result.error is None
        assert result.rows_evicted > 0


def test_rows_of_all_heads_compete_by_the_change_of_their_output() -> None:
    masses = torch.rand(1, 3, 20, generator=torch.Generator().manual_seed(1))
    values = fill((1, 3, 20, 4), "gauss", 2)
    values[:, 2] *= 5  # outputs of this head change more
    rows = CacheView(positions=torch.arange(20).expand(1, 3, -1), values=values)
    stack = [Masses(masses), load_policy("caote"), load_policy("adakv", alpha_safeguard=0.2)]
    kept = select_rows(stack, rows, budget=10, heads="shared").keep[0]
    changes = {
        (h, t): oracle.change_without(masses[0, h].tolist(), values[0, h].double().tolist(), t)
        for h in range(3)
        for t in range(20)
    }
    safe = [sorted(range(20), key=lambda t: -changes[h, t])[:2] for h in range(3)]
    expected = {(h, t) for h in range(3) for t in safe[h]}
    best_first = sorted(changes, key=lambda one: -changes[one])
    expected |= set([one for one in best_first if one not in expected][: 30 - len(expected)])
    assert {tuple(one) for one in kept.nonzero().tolist()} == expected
    assert kept.sum(dim=1).tolist() != [10, 10, 10]
