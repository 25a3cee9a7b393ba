"""Contenders take turns."""

from typing import Any

import pytest
from bench_parts import WORK, measurement, named

from kvpolicy.lab.bench.contenders.contender import Contender, Measurement
from kvpolicy.lab.bench.rounds.turns import Missing, Turn, jobs_of, measure


def test_all_jobs_run_in_every_round_in_rotating_order() -> None:
    ran: list[tuple[str, Any]] = []

    def runs(name: str) -> Contender:
        def run(work: Any) -> Measurement:
            ran.append((name, work))
            return measurement(1.0)

        return named(name, run)

    jobs = jobs_of([runs("a"), runs("b"), runs("c")], [WORK])
    found = list(measure(jobs, rounds=3))
    orders = [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert [turn.job for turn in found] == [(n, WORK.name) for order in orders for n in order]
    assert [turn.round for turn in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert ran == [(name, WORK) for order in orders for name in order]
    ran.clear()
    done = {(turn.round, turn.job) for turn in found[:4]}
    assert list(measure(jobs, rounds=3, done=done)) == found[4:], "measured turns are left out"
    assert len(ran) == 5


def test_others_are_measured_after_one_that_raises_if_that_was_asked_for() -> None:
    def breaks(_: Any) -> Measurement:
        msg = "no such kernel"
        raise RuntimeError(msg)

    def is_large(_: Any) -> Measurement:
        raise MemoryError

    jobs = jobs_of([named("a", breaks), named("b", is_large), named("c")], [WORK])
    broken, large, whole = measure(jobs, rounds=1, goes_on=True)
    assert isinstance(broken, Missing)
    assert broken.failed
    assert "no such kernel" in broken.reason
    assert isinstance(large, Missing)
    assert not large.failed, "it does not fit"
    assert isinstance(whole, Turn)
    with pytest.raises(RuntimeError, match="no such kernel"):
        list(measure(jobs, rounds=1))
