"""Suggested plans fit the memory, one more row or slot would not, and bytes are the allocator's."""

from functools import cache
from typing import Any

import pytest
from families import family_model
from hypothesis import given
from hypothesis import strategies as st
from tiny import shared_model

from kvpolicy import Engine, Plan
from kvpolicy.engine.memory.footprint import footprint
from kvpolicy.engine.memory.suggestion import MOST_SLOTS, budget_of, is_whole, suggest
from kvpolicy.errors import BudgetError, KVPolicyError

STACKS: dict[str, list[Any]] = {
    "plain": ["streaming"],
    "tracks": ["h2o", "protect"],
    "queries": [{"policy": "rkv", "window_size": 4}],
    "registers": [{"policy": "skipkv", "window_size": 4, "delimiters": [3]}],
    "distributes": [{"policy": "pyramidkv", "window_size": 4}],
}
stacks = st.sampled_from(sorted(STACKS))
lengths = st.integers(24, 120)
memories = st.integers(20_000, 400_000)


@cache
def model_of(kind: str) -> Any:
    return shared_model() if kind == "plain" else family_model("gpt_oss", window=20)


models = st.sampled_from(["plain", "windows"]).map(model_of)


def plan(name: str, budget: int) -> Plan:
    return Plan.from_dict({"stack": STACKS[name], "budget": budget})


@given(models, stacks, lengths, memories, st.integers(1, 9))
def test_the_suggested_budget_fits_and_one_more_row_does_not(
    model: Any, name: str, longest: int, memory: int, slots: int
) -> None:
    def plan_of(budget: int) -> Plan:
        return plan(name, budget)

    try:
        found = suggest(plan_of, model, longest=longest, memory=memory, slots=slots)
    except BudgetError:
        least = 24  # more than any of the policies protects
        assert footprint(plan_of(least), model, slots=slots, longest=longest).num_bytes > memory
        return
    chosen = found.chosen
    budget = budget_of(chosen)
    assert chosen.num_bytes <= memory
    assert chosen == footprint(plan_of(budget), model, slots=slots, longest=longest)
    if budget < longest:
        more = footprint(plan_of(budget + 1), model, slots=slots, longest=longest)
        assert more.num_bytes > memory
    else:
        assert is_whole(chosen) or name == "distributes", "some of its layers have fewer rows"
    assert chosen in found.alternatives
    assert all(one.num_bytes <= memory for one in found.alternatives)
    run = Engine(model, plan=chosen.plan, slots=slots).generate(
        [[5] * 10] * slots, max_new_tokens=longest - 10
    )
    assert run.cache.num_bytes == chosen.num_bytes, "the engine allocates as many bytes"


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("slots", [1, 3])
def test_a_budget_that_takes_the_memory_to_the_byte_fits(slots: int) -> None:
    def plan_of(budget: int) -> Plan:
        return plan("plain", budget)

    for budget in (30, 31, 32):
        memory = footprint(plan_of(budget), shared_model(), slots=slots, longest=90).num_bytes
        for less, fitting in ((0, budget), (1, budget - 1)):
            given = {"longest": 90, "memory": memory - less, "slots": slots}
            assert budget_of(suggest(plan_of, shared_model(), **given).chosen) == fitting


@given(models, stacks, lengths, memories, st.integers(16, 60))
def test_the_suggested_slots_fit_and_one_more_does_not(
    model: Any, name: str, longest: int, memory: int, budget: int
) -> None:
    try:
        found = suggest(
            lambda rows: plan(name, rows), model, longest=longest, memory=memory, budget=budget
        )
    except BudgetError:
        one = footprint(plan(name, budget), model, slots=1, longest=longest)
        assert one.bytes_per_slot > memory
        return
    chosen = found.chosen
    assert budget_of(chosen) == budget
    assert chosen.num_bytes <= memory < (chosen.slots + 1) * chosen.bytes_per_slot


@pytest.mark.parametrize("keep", [0.01, 0.25, 0.6, 1.0])
def test_without_slots_as_many_are_suggested_as_keep_enough_rows(keep: float) -> None:
    found = suggest(
        lambda rows: plan("plain", rows), shared_model(), longest=100, memory=150_000, keep=keep
    )
    assert found.enough == max(int(keep * 100), 1)
    assert [one.slots for one in found.alternatives] == [
        2**i for i in range(len(found.alternatives))
    ]
    enough = [one for one in found.alternatives if is_whole(one) or budget_of(one) >= found.enough]
    assert found.chosen == enough[-1]
    assert found.chosen.slots < MOST_SLOTS


def test_if_no_number_of_slots_keeps_enough_rows_it_is_one() -> None:
    found = suggest(
        lambda rows: plan("plain", rows), shared_model(), longest=400, memory=20_000, keep=0.9
    )
    assert found.chosen.slots == 1
    assert found.enough is not None
    assert budget_of(found.chosen) < found.enough


@pytest.mark.nightly
def test_copies_of_compactions_stay_within_what_is_stated() -> None:
    for name in STACKS:
        one = footprint(plan(name, 16), shared_model(), slots=3, longest=100)
        prompts = [[1, 2, 3] * n for n in (3, 7, 11)]
        run = Engine(shared_model(), plan=one.plan, slots=3).generate(
            prompts, max_new_tokens=60, stop_ids=()
        )
        run.results()
        assert run.report.rows_evicted > 0
        assert one.num_bytes < run.report.peak_kv_bytes <= one.num_bytes + one.copied_bytes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"longest": 10**6}, "sequences of 1,000,000 tokens were asked for; the model has"),
        ({"memory": 10}, "1 sequence takes "),
        ({"memory": 9000, "slots": 4}, "4 sequences take "),
        ({"budget": 90, "memory": 9000}, "1 sequence takes "),
        ({"budget": 90, "slots": 9}, "9 sequences take "),
        ({"budget": 2}, "protect"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes: dict[str, int], sentence: str) -> None:
    given = {"longest": 100, "memory": 30_000} | changes
    with pytest.raises(KVPolicyError) as caught:
        suggest(lambda rows: plan("queries", rows), shared_model(), **given)
    assert sentence in str(caught.value)
