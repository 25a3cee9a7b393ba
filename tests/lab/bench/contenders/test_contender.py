"""A contender does the workloads that it can, in whole periods."""

from bench_parts import WORK, measurement, named
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.bench.contenders.contender import Contender, Measurement
from kvpolicy.lab.bench.rounds.turns import jobs_of
from kvpolicy.lab.bench.workload import Decode, Prefill


def test_contenders_do_what_they_can() -> None:
    short, long = Decode(1, 10, 1), Decode(1, 20, 1)
    few = Contender("few", lambda _: measurement(1.0), most_held=10)
    jobs = jobs_of([named("all"), few], [short, long, WORK])
    names = [(job.contender.name, job.work) for job in jobs]
    assert names == [("all", short), ("few", short), ("all", long), ("all", WORK)]


@given(st.integers(1, 60), st.integers(1, 40))
def test_steps_are_rounded_up_to_whole_periods(steps: int, period: int) -> None:
    asked: list[int] = []

    def decode(work: Decode) -> Measurement:
        asked.append(work.steps)
        return measurement(1.0)

    Contender("x", decode, period=period).run(Decode(1, 5, steps))
    assert asked[0] % period == 0
    assert steps <= asked[0] < steps + period


def test_compactions_may_count_in_proportion_without_one_of_every_sequence() -> None:
    """In a buffer of 12 rows, 4 sequences are compacted every 3 steps."""
    contender = Contender("x", lambda _: measurement(1.0), period=12)
    numbers = [
        contender.num_steps(Decode(batch, 5, 7, compacts_all=False)) for batch in (1, 4, 12, 50)
    ]
    assert numbers == [12, 9, 7, 7]


def test_prompts_are_brought_in_by_those_who_can() -> None:
    brings = Contender("brings", prefill=lambda work: measurement(work.num_tokens))
    jobs = jobs_of([named("steps only"), brings], [Prefill(7), Decode(1, 5, 3)])
    assert [job.contender.name for job in jobs] == ["brings", "steps only"]
    assert brings.run(Prefill(7)).mean_step_s == 7
