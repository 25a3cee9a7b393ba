"""What holds for every installed policy: `check_policy` passes, and what that does not draw.

Cases of `check_policy` are exact in float64 and of a few rows; single calls here have more rows, in
single and half precision.
"""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_share import share_of
from strategies import (
    BASES,
    MOST_PROTECTED,
    SMALL_KNOBS,
    STEERING,
    Drawn,
    budgets,
    caches,
    costly,
    fill,
)

from kvpolicy import installed_policies
from kvpolicy.plan.spec import PolicySpec
from kvpolicy.testing import check_policy, keep_rows
from kvpolicy.toolkit.steering_vectors import Calibration, SteeringVector, save_steering_vectors

NAMES = [policy.name for policy in installed_policies()]
# The slow test below has all knobs.
FIRST_KNOBS = [(name, SMALL_KNOBS.get(name, ({},))[0]) for name in NAMES]

# Policies whose heads select together or by head index; in all others each head selects alone.
COUPLED_HEADS = ("tova", "random", "trimkv")

# What is checked of policies that no hook of a run asks: `protect` declares what it protects, and
# `layer_sensitivity` divides the budget while the plan is built.
ANSWERS: dict[str, set[str]] = {"protect": {"protected"}, "layer_sensitivity": set()}


@pytest.fixture(scope="module")
def vector(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A steering vector for the second layer of a model of size 16."""
    file = tmp_path_factory.mktemp("vectors") / "toy.safetensors"
    direction = torch.randn(16, generator=torch.Generator().manual_seed(1))
    steering_vector = SteeringVector(
        vector=direction, layer=1, calibration=Calibration(model="toy")
    )
    save_steering_vectors(file, [steering_vector])
    return str(file)


def with_vector(name: str, knobs: dict, vector: str) -> dict:
    return {"vector": vector, **knobs} if name in STEERING else knobs


def test_policies_of_this_repository_are_installed() -> None:
    baselines = {"full", "streaming", "h2o", "h2o_last", "tova", "knorm", "random", "snapkv"}
    assert baselines | {"pyramidkv", "rkv", "protect", "mix", "merge", "rerotate"} <= set(NAMES)


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "knobs"), FIRST_KNOBS, ids=str)
def test_every_policy_passes_check_policy(name: str, knobs: dict, vector: str) -> None:
    report = check_policy(name, knobs=with_vector(name, knobs, vector), max_examples=2)
    assert {"building", "determinism", "memory", "neighbours", "knobs"} <= set(report.clauses)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_every_policy_passes_check_policy_in_many_cases(name: str, vector: str) -> None:
    variants, num = SMALL_KNOBS.get(name, ({},)), share_of(600)
    for seed, knobs in enumerate(variants):
        knobs = with_vector(name, knobs, vector)
        report = check_policy(name, knobs=knobs, seed=seed, max_examples=num // len(variants))
        answers = ANSWERS.get(name, {"answers"})
        assert not report.skipped.keys() & {"cancellation", "slots", "precision", *answers}


@pytest.mark.nightly
def test_steering_skipkv_passes_check_policy(vector: str) -> None:
    knobs = {"vector": vector, "window_size": 2, "tau": 0.3}
    assert "nan" in check_policy("skipkv", knobs=knobs, max_examples=6).clauses


# Policies as stacks for single calls, with each variant of their knobs. `seal` only steers.
STACKS: dict[str, list[list[PolicySpec]]] = {
    name: [
        [*BASES.get(name, ()), PolicySpec(name, knobs)] for knobs in SMALL_KNOBS.get(name, ({},))
    ]
    for name in NAMES
    if name not in STEERING
}


def kept_of(stack: list[PolicySpec], drawn: Drawn, budget: int) -> torch.Tensor:
    # Hidden states for policies that annotate rows.
    states = drawn.keys.transpose(1, 2).flatten(2)
    return keep_rows(stack, drawn.keys, drawn.values, drawn.queries, budget=budget, states=states)


@costly
@given(
    drawn=caches(batch=2, min_rows=MOST_PROTECTED + 1),
    num_left=st.integers(1, 8),
    variant=st.integers(0, 3),
)
def test_a_sequence_keeps_the_same_rows_in_any_batch(
    drawn: Drawn, num_left: int, variant: int
) -> None:
    budget = max(drawn.num_rows - num_left, MOST_PROTECTED)

    def differs(stack: list[PolicySpec]) -> bool:
        alone = [kept_of(stack, drawn.row(b), budget) for b in range(2)]
        return not torch.equal(kept_of(stack, drawn, budget), torch.cat(alone))

    stacks = {name: one[variant % len(one)] for name, one in STACKS.items()}
    assert [name for name, stack in stacks.items() if differs(stack)] == []


def test_nothing_is_evicted_within_the_budget() -> None:
    drawn = of_dtype(torch.float32)
    rows = torch.arange(24).expand(2, 2, 24)
    evicting = [
        name
        for name, stacks in STACKS.items()
        if not all(kept_of(stack, drawn, 24).equal(rows) for stack in stacks)
    ]
    assert evicting == []


def test_rows_in_half_precision_are_scored_in_single_precision() -> None:
    half = of_dtype(torch.bfloat16)
    copies = {name: getattr(half, name).float() for name in ("keys", "values", "queries")}
    single = attrs.evolve(half, **copies)
    rounding = [
        name
        for name, stacks in STACKS.items()
        if not all(kept_of(stack, half, 12).equal(kept_of(stack, single, 12)) for stack in stacks)
    ]
    assert rounding == []


def of_dtype(dtype: torch.dtype) -> Drawn:
    """Two sequences of 24 rows in two heads, of two queries each."""
    keys, values = (fill((2, 2, 24, 8), "gauss", seed).to(dtype) for seed in (1, 2))
    return Drawn(keys, values, fill((2, 4, 24, 8), "gauss", 3).to(dtype), kind="gauss", seed=1)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "name",
    [
        # seal's default vector is the bundled reasoner's.
        pytest.param(name, marks=[pytest.mark.needs_reasoner] if name == "seal" else [])
        for name in NAMES
        if name not in COUPLED_HEADS
    ],
)
@given(data=st.data(), drawn=caches(num_kv_heads=3, group=2))
def test_heads_do_not_influence_each_other(name: str, data: st.DataObject, drawn: Drawn) -> None:
    knobs = data.draw(st.sampled_from(SMALL_KNOBS.get(name, ({},))), label="knobs")
    budget = data.draw(budgets(drawn.num_rows, min_budget=MOST_PROTECTED), label="budget")
    specs = [*BASES.get(name, ()), PolicySpec(name, knobs)]
    kept = keep_rows(specs, drawn.keys, drawn.values, drawn.queries, budget=budget)
    order = data.draw(st.permutations(range(3)), label="order of heads")
    queries = drawn.queries.unflatten(1, (3, 2))[:, order].flatten(1, 2)
    moved = attrs.evolve(
        drawn, keys=drawn.keys[:, order], values=drawn.values[:, order], queries=queries
    )
    permuted = keep_rows(specs, moved.keys, moved.values, moved.queries, budget=budget)
    assert torch.equal(permuted, kept[:, order])
