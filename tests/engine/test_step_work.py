"""What a decode step does on the host does not grow, and asks no policy if nothing is due."""

import gc
import sys
from pathlib import Path
from types import FrameType

import attrs
from tiny import shared_model
from torch import Tensor

import kvpolicy
from kvpolicy import Engine, Plan, Request, Run, hookimpl

PACKAGE = Path(kvpolicy.__file__).parent
BUDGET, BUFFER = 64, 32


def begun(plan: Plan, *, slots: int, prompt_len: int) -> Run:
    """A run in which two sequences are decoded."""
    run = Engine(shared_model(), plan=plan, slots=slots).open_run(max_len=200)
    for token in (1, 2):
        run.submit(Request([token] * prompt_len, 100, stop_ids=()))
    for _ in range(4):
        run.step()
    return run


def python_calls(run: Run) -> int:
    """Calls of Python functions of kvpolicy in the next step."""
    num_calls = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls
        num_calls += event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE)

    gc.disable()  # what it finalizes is no part of the step
    sys.setprofile(note)
    try:
        run.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return num_calls


def test_python_calls_do_not_grow_with_slots_or_rows() -> None:
    plan = Plan.uniform("h2o", "protect", budget=BUDGET, buffer=BUFFER)
    few = python_calls(begun(plan, slots=2, prompt_len=4))
    assert python_calls(begun(plan, slots=16, prompt_len=4)) == few
    assert python_calls(begun(plan, slots=2, prompt_len=BUDGET)) == few


@attrs.define(eq=False)
class Asked:
    """Notes that it was asked."""

    hooks: list[str] = attrs.field(factory=list)

    @hookimpl
    def protect(self, positions: Tensor) -> Tensor:
        self.hooks.append("protect")
        return positions < 0

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        self.hooks.append("score")
        return positions.float()

    @hookimpl
    def select(self, scores: Tensor, budget: int) -> Tensor:
        self.hooks.append("select")
        return scores.topk(budget).indices.sort().values


def test_step_without_a_compaction_asks_no_policy() -> None:
    policy = Asked()
    plan = Plan.uniform(policy, budget=BUDGET, buffer=BUFFER)
    run = begun(plan, slots=2, prompt_len=BUDGET)
    while not run.report.compactions:
        assert policy.hooks == []
        run.step()
    assert {*policy.hooks} == {"protect", "score", "select"}
