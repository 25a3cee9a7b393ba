"""What would end later than the time allows is not begun."""

from itertools import count

import pytest
from bench_parts import SIZE, measurement, named
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.bench.contenders.contender import Contender, Measurement
from kvpolicy.lab.bench.roofline import Machine, least_prefill_s, least_step_s
from kvpolicy.lab.bench.rounds.time_limit import TimeLimit
from kvpolicy.lab.bench.rounds.turns import Job, Missing, Turn, measure
from kvpolicy.lab.bench.workload import Decode, Prefill, Text, Workload

MACHINE = Machine(bytes_per_s=1e6, products_per_s=1e6)


def limit(ends: float = 100.0, now: float = 0.0) -> TimeLimit:
    return TimeLimit(ends, MACHINE, SIZE, clock=lambda: now)


def test_a_prompt_is_multiplied_with_all_weights_and_with_half_of_itself() -> None:
    """1,000 tokens; 250 weights; 32 numbers of queries, in two products, for each pair."""
    pairs = 1000 * 1000 / 2
    products = 2 * 1000 * 250 + 2 * 2 * pairs * 32
    assert least_prefill_s(MACHINE, SIZE, 1000) == pytest.approx(products / 1e6)


WORKS: list[Workload] = [Decode(2, 500, 40), Prefill(3000), Text(2, 100, 200, 300)]


@pytest.mark.parametrize("work", WORKS, ids=lambda one: type(one).__name__)
def test_a_job_is_expected_to_take_as_long_as_it_took_before(work: Workload) -> None:
    """Twice as slow is expected to take twice as long, but for what comes before."""
    job = Job(named("x", has_cache=False), work)
    expected = []
    for seconds in (1.0, 2.0, 3.0):
        known = limit()
        known.learn(job, measurement(seconds))
        expected.append(known.expected_s(job))
    assert expected[1] - expected[0] == pytest.approx(expected[2] - expected[1])
    repeated = {Decode: 40, Prefill: 1, Text: 300}[type(work)]
    assert expected[1] - expected[0] >= repeated
    known.learn(job, measurement(3.0, compile_s=50.0))
    assert known.expected_s(job) == pytest.approx(expected[2] + 50)
    assert known.expected_s(Job(named("other"), work)) == limit().expected_s(
        Job(named("other"), work)
    )


@given(st.integers(1, 400), st.integers(1, 20_000), st.integers(1, 300))
def test_no_more_is_expected_for_less(batch: int, held: int, steps: int) -> None:
    """And never less than the arithmetic of the machine."""

    def expected(*sizes: int) -> float:
        return limit().expected_s(Job(named("x"), Decode(*sizes)))

    found = expected(batch, held, steps)
    assert found >= steps * least_step_s(MACHINE, SIZE, batch, batch * held * SIZE.row_bytes)
    assert expected(batch, held, steps + 1) >= found
    assert expected(batch + 1, held, steps) >= found
    assert expected(batch, held + 1, steps) >= found
    assert limit().expected_s(Job(named("x", budget=1), Decode(batch, held, steps))) <= found


def test_what_would_end_later_is_left_out_by_name_and_the_rest_is_measured() -> None:
    ran: list[str] = []

    def runs(name: str) -> Contender:
        def run(work: Decode) -> Measurement:
            ran.append(name)
            return measurement(1.0)

        return Contender(name, run, has_cache=False)

    works = [Decode(1, 10, 3, label="short"), Decode(1, 10, 10**6, label="long")]
    jobs = [Job(runs(name), work) for work in works for name in ("a", "b")]
    clock = count()  # a second passes whenever it is asked
    known = TimeLimit(50, MACHINE, SIZE, clock=lambda: next(clock))
    found = list(measure(jobs, rounds=1, leave_out=known.reason_against))
    assert ran == ["a", "b"]
    assert [one.job for one in found] == [job.name for job in jobs]
    assert [type(one) for one in found] == [Turn, Turn, Missing, Missing]
    assert [one.failed for one in found if isinstance(one, Missing)] == [False, False]
    late = measure(jobs[:1], rounds=1, leave_out=limit(ends=5, now=6).reason_against)
    assert [type(one) for one in late] == [Missing], "the time is up"
