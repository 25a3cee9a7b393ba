"""Static decode steps after a prefill, as an engine runs them."""

from typing import Any

from kvpolicy import Engine, Plan, Request
from kvpolicy.model.adapter import ForwardInput


def begun_decode(model: Any, plan: Plan, requests: list[Request], **options: Any) -> ForwardInput:
    """The forward of a decode step that is about to run, two steps after the prompts."""
    engine = Engine(model, plan=plan, slots=len(requests), **options)
    run = engine.generate(requests)
    for _ in range(2):
        run.step()
    given = run.batch.begin_decode()
    given.draws = True
    return given
