"""The engine does the work that is reported: rows read, compactions, bytes."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from bench_parts import HEAD_DIM, HEADS, IN_FP32, LAYERS, ROW, cell
from tiny import tiny_model

from kvpolicy import Engine, Plan
from kvpolicy.engine.engine import Run
from kvpolicy.engine.requests.results import Events
from kvpolicy.lab.bench.contenders.engine import engine_under, filled_run
from kvpolicy.lab.bench.workload import Decode, Text

BUDGET = {"budget": 8, "buffer": 4}


def lengths_of(work: Text) -> list[int]:
    return [len(prompt) for prompt in work.prompts(61)]


@pytest.mark.parametrize("stack", ["full", "knorm"])
def test_steps_of_a_filled_cache_are_recorded_from_the_beginning(stack: str) -> None:
    """As after many steps: no cell is measured that long."""
    engine = Engine(tiny_model(), None, Plan.uniform(stack, **BUDGET if stack != "full" else {}))
    run = filled_run(engine, Decode(batch=1, held=8, steps=3), steps=3)
    run.step()
    assert run.report.path == "static, recorded"


@pytest.mark.parametrize("stack", ["full", "knorm"])
def test_rows_in_integers_are_as_many_rows_and_fewer_bytes(stack: str) -> None:
    work = Decode(batch=2, held=30, steps=4)
    plain, packed = (
        engine_under(tiny_model(), cell(stack, **rows)).run(work) for rows in ({}, {"rows": "int8"})
    )
    assert packed.read_bytes < plain.read_bytes / 2
    assert packed.rows_mean == plain.rows_mean
    assert plain.rows_mean == pytest.approx(plain.read_bytes / ROW / work.batch)


@pytest.mark.parametrize(("stack", "new_tokens"), [("full", 6), ("knorm", 19)])
def test_the_engine_attends_to_as_many_rows_as_a_plain_count(stack: str, new_tokens: int) -> None:
    budget, buffer = 8, 4
    contender = engine_under(tiny_model(), cell(stack, budget, buffer))
    work = Text(batch=2, prompt_min=2, prompt_max=4, new_tokens=new_tokens)
    assert contender.text is not None
    done = contender.text(work)
    rows_read, compactions = 0, 0
    for rows in lengths_of(work):
        for step in range(1, new_tokens):
            rows += 1
            if step > 1:
                rows_read += rows
            if stack != "full" and rows == budget + buffer:
                rows = budget
                compactions += 0 if step == new_tokens - 1 else LAYERS  # its text has ended
    assert done.read_bytes == pytest.approx(rows_read * ROW / (new_tokens - 2))
    assert done.compactions == compactions
    assert len(done.steps_s) == new_tokens - 2
    # Keys, values, and positions of 8 bytes; a full cache is allocated for the longest sequence.
    slab = 4 + 6 if stack == "full" else budget + buffer
    allocated = LAYERS * 2 * HEADS * slab * (2 * HEAD_DIM * IN_FP32 + 8)
    moved = 0 if stack == "full" else HEADS * budget * HEAD_DIM * IN_FP32
    assert allocated + moved <= done.kv_bytes <= allocated + 4 * moved
    assert done.policy_share is not None
    assert 0 <= done.policy_share < 1
    assert (done.policy_share > 0) == (stack != "full")


@pytest.mark.parametrize("stack", ["full", "knorm", "h2o", "skipkv"])
def test_the_engine_decodes_over_a_filled_cache(stack: str) -> None:
    """A buffer of steps compacts every sequence once in every layer."""
    budget, buffer, batch, held = 16, 6, 3, 100
    contender = engine_under(tiny_model(), cell(stack, budget, buffer))
    done = contender.run(Decode(batch, held, steps=1))
    if stack == "full":
        assert (done.compactions, len(done.steps_s)) == (0, 1)
        assert done.read_bytes == batch * ROW * (held + 4), "three rows of the warm-up, its own"
        return
    assert len(done.steps_s) == contender.period == buffer
    assert done.compactions == batch * LAYERS
    assert done.policy_share is not None
    assert 0 < done.policy_share < 1
    # Every sequence passes through all numbers of rows, whatever it began with.
    assert done.read_bytes == batch * ROW * np.mean(np.arange(budget + 1, budget + buffer + 1))


@pytest.mark.parametrize("batch", [1, 2, 6, 9])
def test_measured_steps_follow_a_compaction_and_last_from_one_reading_to_the_next(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: what compiles kernels is over, and every interval has a step of its own."""
    module = "kvpolicy.lab.bench.contenders.engine"
    num_read, compactions, real = 0, 0, Run.step

    def step(run: Run) -> Events:
        nonlocal num_read, compactions
        events = real(run)
        num_read += len(events.tokens)
        compactions = run.report.compactions
        return events

    monkeypatch.setattr(Run, "step", step)
    monkeypatch.setattr(f"{module}.Engine", partial(Engine, steps_per_read=2))
    # A second passes whenever the tokens of a step are read, and at no other time.
    clock = SimpleNamespace(perf_counter=lambda: num_read / batch)
    monkeypatch.setattr(f"{module}.time", clock)
    buffer = 6
    contender = engine_under(tiny_model(), cell("h2o", 16, buffer))
    done = contender.run(Decode(batch, 100, steps=12, compacts_all=False))
    assert done.steps_s == (1,) * 12
    assert done.compactions == 12 * batch * LAYERS / buffer
    assert compactions - done.compactions >= LAYERS, "one before"


def test_some_steps_are_profiled_after_those_that_are_measured() -> None:
    contender = engine_under(tiny_model(), cell("h2o", 16, 6))
    done = contender.run(Decode(3, 100, steps=4, compacts_all=False, profiled=2))
    assert len(done.steps_s) == 4
    assert done.profile is not None
    assert done.profile.launches > 0
    assert contender.run(Decode(3, 100, steps=1)).profile is None


@pytest.mark.parametrize("stack", ["full", "h2o"])
def test_there_is_room_for_steps_that_are_taken_together(
    stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: tokens of several steps are read at a time, and so many are measured."""
    module = "kvpolicy.lab.bench.contenders.engine.Engine"
    monkeypatch.setattr(module, partial(Engine, steps_per_read=2))
    contender = engine_under(tiny_model(), cell(stack, 16, 6))
    done = contender.run(Decode(3, 40, steps=10, compacts_all=False, profiled=3))
    assert 10 <= len(done.steps_s) < 10 + 2
    assert done.profile is not None
    assert done.profile.launches > 0


def test_policies_take_no_more_than_all_of_the_decode_time() -> None:
    """Long prompts and few tokens: nearly all compactions are before the first decode step."""
    contender = engine_under(tiny_model(), cell("knorm"))
    assert contender.text is not None
    done = contender.text(Text(2, 120, 120, 3))
    assert done.policy_share is not None
    assert 0 <= done.policy_share <= 1
