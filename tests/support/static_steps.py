"""Static decode steps after a prefill, as an engine runs them."""

from typing import Any

from kvpolicy import Engine, Plan, Request
from kvpolicy.engine.engine import Run
from kvpolicy.model.forward_input import ForwardInput


def begun_decode(model: Any, plan: Plan, requests: list[Request], **options: Any) -> ForwardInput:
    """The forward of a decode step that is about to run, two steps after the prompts."""
    engine = Engine(model, plan=plan, slots=len(requests), **options)
    run = engine.generate(requests)
    for _ in range(2):
        run.step()
    given = begin_decode(run)
    given.draws = True
    return given


def begin_decode(run: Run) -> ForwardInput:
    """The forward of the next static decode step of a run."""
    run.core.evictor.evict(run.scheduler.admit())
    step, runner = run.scheduler.schedule(), run.core.runner
    assert step is not None
    assert step.is_static
    for one in run.core.extensions:
        one.before(step)
    assert runner.static is not None
    return runner.begin_static(step, runner.static)
