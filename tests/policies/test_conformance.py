"""What every installed policy must do, whatever its method."""

import pytest
import torch
from compare import assert_rows_shape
from hypothesis import given
from hypothesis import strategies as st
from strategies import MOST_PROTECTED, SMALL_KNOBS, Drawn, budgets, caches, rounds

from kvpolicy import installed_policies, load_policy
from kvpolicy.stack import Stack
from kvpolicy.testing import keep_rows, replay

NAMES = [policy.name for policy in installed_policies()]
every_policy = pytest.mark.parametrize("name", NAMES)

#: Policies for which a head's number matters: each head draws lots of its own.
BY_HEAD_NUMBER = ("random",)


def drawn_knobs(data: st.DataObject, name: str) -> dict:
    return data.draw(st.sampled_from(SMALL_KNOBS.get(name, ({},))), label="knobs")


def drawn_budget(data: st.DataObject, drawn: Drawn) -> int:
    return data.draw(budgets(drawn.num_rows, min_budget=MOST_PROTECTED), label="budget")


def test_the_policies_of_this_repository_are_installed() -> None:
    baselines = {"full", "streaming", "h2o", "h2o_last", "tova", "knorm", "random", "snapkv"}
    assert baselines | {"pyramidkv", "rkv", "protect", "rerotate"} <= set(NAMES)


@every_policy
@given(data=st.data(), drawn=caches())
def test_it_keeps_rising_rows_within_the_budget(
    name: str, data: st.DataObject, drawn: Drawn
) -> None:
    knobs, budget = drawn_knobs(data, name), drawn_budget(data, drawn)
    kept = keep_rows(name, drawn.keys, drawn.values, drawn.queries, budget=budget, **knobs)
    stack = Stack([(name, load_policy(name, **knobs))])
    if stack.bounded or stack.implements("score"):
        assert_rows_shape(kept, drawn.keys, budget)
    else:  # the full cache
        assert_rows_shape(kept, drawn.keys, drawn.num_rows)
    newest = torch.arange(max(drawn.num_rows - stack.n_last, 0), drawn.num_rows)
    first = torch.arange(min(stack.n_first, drawn.num_rows))
    for promised in (newest, first):
        assert (kept[..., None] == promised).any(dim=2).all()


@every_policy
@given(data=st.data(), drawn=caches())
def test_it_reads_and_never_writes(name: str, data: st.DataObject, drawn: Drawn) -> None:
    inputs = (drawn.keys, drawn.values, drawn.queries)
    before = [tensor.clone() for tensor in inputs]
    keep_rows(name, *inputs, budget=drawn_budget(data, drawn), **drawn_knobs(data, name))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@every_policy
@given(data=st.data(), drawn=caches(min_rows=2, max_rows=24))
def test_it_answers_alike_when_asked_again(name: str, data: st.DataObject, drawn: Drawn) -> None:
    policy = load_policy(name, **drawn_knobs(data, name))
    plan = data.draw(rounds(drawn.num_rows))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    # The same object twice: what it remembers belongs to the sequence, not to it.
    first = replay(policy, *inputs, budget=MOST_PROTECTED, **plan)
    second = replay(policy, *inputs, budget=MOST_PROTECTED, **plan)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_policy
@given(data=st.data(), drawn=caches(num_kv_heads=3, group=2))
def test_heads_do_not_influence_each_other(name: str, data: st.DataObject, drawn: Drawn) -> None:
    if name in BY_HEAD_NUMBER:
        pytest.skip("the number of a head is part of what it draws")
    knobs, budget = drawn_knobs(data, name), drawn_budget(data, drawn)
    kept = keep_rows(name, drawn.keys, drawn.values, drawn.queries, budget=budget, **knobs)
    order = data.draw(st.permutations(range(3)), label="order of heads")
    queries = drawn.queries.unflatten(1, (3, 2))[:, order].flatten(1, 2)
    permuted = keep_rows(
        name, drawn.keys[:, order], drawn.values[:, order], queries, budget=budget, **knobs
    )
    assert torch.equal(permuted, kept[:, order])


@every_policy
def test_one_row_more_than_the_budget_loses_one_row(name: str) -> None:
    rng = torch.Generator().manual_seed(4)
    keys = torch.randn(2, 2, MOST_PROTECTED + 1, 4, generator=rng)
    queries = torch.randn(2, 4, MOST_PROTECTED + 1, 4, generator=rng)
    kept = keep_rows(name, keys, keys, queries, budget=MOST_PROTECTED)
    if Stack([(name, load_policy(name))]).bounded:
        assert kept.shape[2] == MOST_PROTECTED
    else:
        assert kept.shape[2] == MOST_PROTECTED + 1
