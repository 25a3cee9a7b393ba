"""The largest batch within a memory, by arithmetic and one trial."""

import pytest
import torch
from bench_parts import IN_FP32, LAYERS, ROW, cell, measurement
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import Contender, Measurement
from kvpolicy.lab.bench.contenders.engine import engine_under
from kvpolicy.lab.bench.operating_points.largest_batch import largest_batch, smaller_batch
from kvpolicy.lab.bench.rounds.turns import Job, Turn, measure
from kvpolicy.lab.bench.workload import Decode

STEP = Decode(batch=1, held=30, steps=3)


@pytest.mark.parametrize(("budget", "rows"), [(None, 30 + 4 + 1), (16, 16)])
def test_keys_and_values_say_how_many_sequences_fit(budget: int | None, rows: int) -> None:
    contender = Contender("x", lambda _: measurement(1.0), budget=budget, period=4)
    assert largest_batch(contender, STEP, 7 * rows * 10, 10) == 7
    assert largest_batch(contender, STEP, 7 * rows * 10 - 1, 10) == 6
    assert largest_batch(contender, STEP, 9, 10) == 0


@pytest.mark.parametrize("stack", ["full", "h2o"])
def test_the_engine_fits_as_many_as_it_allocates_for(stack: str) -> None:
    contender = engine_under(tiny_model(), cell(stack, 16, 4))
    work = Decode(batch=1, held=40, steps=4)
    num_bytes = 40 * ROW * 5
    found = largest_batch(contender, work, num_bytes, ROW)
    assert found > 1
    measured = contender.decode(Decode(found, 40, 4))  # type: ignore[misc]
    assert measured.kv_bytes <= num_bytes
    assert largest_batch(contender, work, LAYERS * IN_FP32, ROW) == 0


@given(st.integers(2, 5000), st.none() | st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_batch_that_was_too_large_gets_smaller(
    batch: int, kv_bytes: int | None, num_bytes: int
) -> None:
    found = smaller_batch(batch, kv_bytes, num_bytes)
    assert 0 <= found < batch
    if kv_bytes is not None:
        assert found * kv_bytes <= batch * num_bytes


def tried(most: int, most_bytes: float, batch: int) -> tuple[list[int], list[int]]:
    """Batches that were tried, and those of the turns of two rounds."""
    asked: list[int] = []

    def decode(work: Decode) -> Measurement:
        asked.append(work.batch)
        if work.batch > most:
            torch.empty(1 << 60, dtype=torch.uint8)
        return measurement(1.0, kv_bytes=10 * work.batch)

    job = Job(Contender("x", decode), Decode(batch, 30, 3), most_bytes)
    turns = list(measure([job], rounds=2))
    assert all(isinstance(turn, Turn) for turn in turns)
    return asked, [turn.measured.batch for turn in turns]  # type: ignore[union-attr]


def test_a_trial_is_the_measurement_and_is_repeated_with_less_if_it_does_not_fit() -> None:
    assert tried(100, 1000, 90) == ([90, 90], [90, 90])
    assert tried(80, 1000, 90) == ([90, 78, 78], [78, 78]), "no memory"
    assert tried(100, 450, 90) == ([90, 45, 45], [45, 45]), "more than the limit"


def test_one_sequence_that_is_too_large_ends_with_a_sentence() -> None:
    job = Job(Contender("x", lambda _: measurement(1.0, kv_bytes=10)), STEP, most_bytes=5)
    with pytest.raises(KVPolicyError, match="one sequence"):
        list(measure([job], rounds=1))


def test_other_errors_are_raised() -> None:
    def broken(_: Decode) -> Measurement:
        msg = "another error"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="another error"):
        list(measure([Job(Contender("x", broken), STEP, 1e9)], rounds=1))
