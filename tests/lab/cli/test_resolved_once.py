"""A plan is resolved once for each cell of a sweep, and its stacks are built once."""

import pickle
from collections import Counter
from pathlib import Path

import pytest
from shell import Shell

from kvpolicy import Plan
from kvpolicy.errors import PlanError
from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.resolved import ResolvedPlan


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often plans are resolved and stacks with policies are built."""
    counted: Counter[str] = Counter()
    resolve, build = Plan.resolve, Stack.__init__

    def counting_resolve(self: Plan, *args: object, **options: object) -> ResolvedPlan:
        counted["resolves"] += 1
        return resolve(self, *args, **options)  # type: ignore[arg-type]

    def counting_build(self: Stack, policies: list[object], **options: object) -> None:
        counted["stacks"] += bool(policies)
        build(self, policies, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Plan, "resolve", counting_resolve)
    monkeypatch.setattr(Stack, "__init__", counting_build)
    return counted


@pytest.mark.nightly
@pytest.mark.needs_reasoner
def test_one_cell_of_a_sweep(kvpolicy: Shell, tmp_path: Path, counts: Counter[str]) -> None:
    plan = tmp_path / "p.toml"
    plan.write_text('budget = 48\nbuffer = 16\nstack = ["h2o", "protect"]\n')
    answer = kvpolicy(
        *("ablate", "--plan", plan, "--n", 1, "--max-new-tokens", 8, "--workers", 1),
        *("--output", tmp_path / "out"),
    )
    assert answer.status == 0, answer.err
    assert counts == {"resolves": 1, "stacks": 1}


def test_stacks_are_kept_with_the_plan_and_built_again_in_another_process(
    counts: Counter[str],
) -> None:
    resolved = Plan.uniform("h2o", "protect", budget=16).resolve(4)
    assert resolved.stacks() is resolved.stacks()
    assert counts["stacks"] == 1
    again = pickle.loads(pickle.dumps(resolved))
    assert (again, again.digest()) == (resolved, resolved.digest())
    assert again.stacks()[0] is again.stacks()[3]
    assert counts["stacks"] == 2


def test_a_resolved_plan_is_for_one_number_of_layers() -> None:
    resolved = Plan.uniform("full").resolve(4)
    assert resolved.resolve(4) is resolved
    with pytest.raises(PlanError, match="4 layers"):
        resolved.resolve(2)


def test_a_default_budget_is_for_plans_that_leave_one_open() -> None:
    open_ = Plan.uniform("h2o").resolve(2, default_budget=9)
    assert [layer.budget for layer in open_.layers] == [9, 9]
    assert open_.uses_default_budget
    for plan in (Plan.uniform("h2o", budget=12), Plan.uniform("full")):
        resolved = plan.resolve(2, default_budget=9)
        assert resolved == plan.resolve(2)
        assert not resolved.uses_default_budget
