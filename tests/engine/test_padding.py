"""Pads are stored only by plans with ``padding="stored"``."""

import attrs
import pytest
from recorder import Recorder
from tiny import shared_model

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.errors import HookResultError, PlanError
from kvpolicy.state import WaitingRequest


@attrs.define(eq=False)
class InPairs:
    """Admits two requests at a time, when all slots are free."""

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


def test_stored_pads_reduce_the_budget() -> None:
    # The longest prompt of the first pair has 9 tokens, that of the second 7; the sequence
    # with fewer rows is compacted first.
    assert sorted(map(sorted, budgets_seen("stored"))) == [[11], [16], [16], [16]]


def test_stored_pads_do_not_reduce_protected_rows() -> None:
    recorder = Recorder()
    plan = Plan.uniform(
        "rkv", recorder, budget=10, buffer=4, schedule=[InPairs()], padding="stored"
    )
    prompts = [[1] * 2, [2] * 9]
    Engine(shared_model(), plan=plan, slots=2).generate(prompts, max_new_tokens=30).results()
    kept = {one.kept.shape[1] for record in recorder.records for one in record.compactions}
    assert kept == {8, 10}


def test_stored_pads_do_not_change_the_full_cache() -> None:
    def tokens(padding: str) -> list[tuple[int, ...]]:
        plan = Plan.uniform("full", schedule=[InPairs()], padding=padding)
        run = Engine(shared_model(), plan=plan, slots=2).generate(PROMPTS, max_new_tokens=12)
        return [result.tokens for result in run.results()]

    assert tokens("stored") == tokens("none")


def test_schedule_without_admission_while_idle_raises() -> None:
    class Waits:
        @hookimpl
        def schedule(self) -> list[list[int]]:
            return []

    plan = Plan.uniform("full", schedule=[Waits()])
    with pytest.raises(HookResultError, match="1"):
        Engine(shared_model(), plan=plan).generate([[1]]).results()


def test_unknown_padding_raises() -> None:
    with pytest.raises(PlanError, match="padding"):
        Plan.from_dict({"stack": ["full"], "padding": "left"})


def test_padding_is_in_the_plan_only_if_stored() -> None:
    plain, stored = (
        Plan.uniform("h2o", budget=16, padding=padding).resolve(2) for padding in ("none", "stored")
    )
    assert "padding" not in plain.to_dict()
    assert stored.to_dict()["padding"] == "stored"
    assert plain.digest() != stored.digest()
