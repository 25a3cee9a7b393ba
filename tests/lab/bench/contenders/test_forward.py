"""Prompts are brought in by the model's own forward and by the engine, and timed."""

import pytest
import torch
from bench_parts import ROW, cell
from tiny import tiny_model

from kvpolicy.lab.bench.contenders.engine import engine_under
from kvpolicy.lab.bench.contenders.forward import better_of_two, forward
from kvpolicy.lab.bench.timing import synchronized_time
from kvpolicy.lab.bench.workload import Prefill


def test_a_forward_keeps_all_rows_of_a_prompt() -> None:
    contender = forward(tiny_model())
    done = contender.run(Prefill(40, batch=2))
    assert done.kv_bytes == 2 * 40 * ROW
    assert done.steps_s == (done.prefill_s,)
    assert contender.decode is None


@pytest.mark.parametrize("stack", ["full", "h2o"])
def test_the_engine_brings_a_prompt_in_and_holds_what_its_plan_says(stack: str) -> None:
    done = engine_under(tiny_model(), cell(stack, 8, 4)).run(Prefill(60))
    assert done.prefill_s is not None
    assert done.prefill_s > 0
    assert (done.kv_bytes > 60 * ROW) == (stack == "full")


def test_what_takes_long_is_not_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 9.0, 20.0, 23.0, 30.0, 32.0])
    monkeypatch.setattr(f"{forward.__module__}.{synchronized_time.__name__}", lambda _: next(times))
    device = torch.device("cpu")
    assert better_of_two(lambda: None, device) == 9.0
    assert better_of_two(lambda: None, device) == 2.0
