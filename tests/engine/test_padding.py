"""Pads are never stored, but for plans that ask to study what they do."""

import attrs
import pytest
from recorder import Recorder
from tiny import shared_model

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.errors import HookResultError, PlanError
from kvpolicy.state import WaitingRequest


@attrs.define(eq=False)
class InPairs:
    """Two at a time, when all slots are free."""

    @hookimpl
    def schedule(self, waiting: list[WaitingRequest], num_active: int) -> list[list[int]]:
        return [] if num_active else [[request.id for request in waiting[:2]]]


PROMPTS = [[1] * 4, [2] * 9, [3] * 7, [4] * 7]


def budgets_seen(padding: str) -> list[set[int]]:
    recorder = Recorder()
    plan = Plan.uniform("h2o", recorder, budget=16, buffer=4, schedule=[InPairs()], padding=padding)
    run = Engine(shared_model(), plan=plan, slots=2).generate(PROMPTS, max_new_tokens=40)
    results = run.results()
    assert all(len(result.tokens) == 40 for result in results)
    seen = []
    for record in recorder.records:
        kept = {one.kept.shape[1] for one in record.compactions}
        rows = {one.positions.shape[1] for one in record.compactions}
        assert rows == {n + 4 for n in kept}
        seen.append(kept)
    return seen


def test_pads_are_not_stored() -> None:
    assert budgets_seen("none") == [{16}] * 4


def test_stored_pads_take_their_part_of_the_budget() -> None:
    # 9 tokens is the longest prompt of the first pair, 7 of the second; who has fewer rows
    # is compacted first.
    assert sorted(map(sorted, budgets_seen("stored"))) == [[11], [16], [16], [16]]


def test_pads_leave_the_rows_that_policies_protect() -> None:
    recorder = Recorder()
    plan = Plan.uniform(
        "rkv", recorder, budget=10, buffer=4, schedule=[InPairs()], padding="stored"
    )
    prompts = [[1] * 2, [2] * 9]
    Engine(shared_model(), plan=plan, slots=2).generate(prompts, max_new_tokens=30).results()
    kept = {one.kept.shape[1] for record in recorder.records for one in record.compactions}
    assert kept == {8, 10}


def test_the_full_cache_has_no_budget_to_lose() -> None:
    def tokens(padding: str) -> list[tuple[int, ...]]:
        plan = Plan.uniform("full", schedule=[InPairs()], padding=padding)
        run = Engine(shared_model(), plan=plan, slots=2).generate(PROMPTS, max_new_tokens=12)
        return [result.tokens for result in run.results()]

    assert tokens("stored") == tokens("none")


def test_waiting_with_nothing_under_way_is_refused() -> None:
    class Waits:
        @hookimpl
        def schedule(self) -> list[list[int]]:
            return []

    plan = Plan.uniform("full", schedule=[Waits()])
    with pytest.raises(HookResultError, match="expected between 1 and 1"):
        Engine(shared_model(), plan=plan).generate([[1]]).results()


def test_another_word_is_refused() -> None:
    with pytest.raises(PlanError, match="padding"):
        Plan.from_dict({"stack": ["full"], "padding": "left"})


def test_only_plans_that_store_pads_say_so() -> None:
    plain, stored = (
        Plan.uniform("h2o", budget=16, padding=padding).resolve(2) for padding in ("none", "stored")
    )
    assert "padding" not in plain.to_dict()
    assert stored.to_dict()["padding"] == "stored"
    assert plain.digest() != stored.digest()
