"""Results over the rounds: ratios within a round, spreads, latencies."""

import attrs
import pytest
from bench_parts import SIZE, jobs_at, measurement, named, one_round
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.bench.contenders.contender import (
    FIRST_PLAN,
    FORWARD,
    GENERATE,
    KVPRESS,
    LIMIT,
    Contender,
)
from kvpolicy.lab.bench.roofline import Machine
from kvpolicy.lab.bench.rounds.summary import (
    complete_rounds,
    summarize,
    summarize_prefills,
)
from kvpolicy.lab.bench.rounds.turns import Job, Turn
from kvpolicy.lab.bench.workload import Decode, Prefill


def test_ratios_are_paired_by_round() -> None:
    """Both get slower from round to round, and the ratio is 2 in each."""
    who = [
        named(GENERATE),
        named("full"),
        named("small", budget=16, references={GENERATE: GENERATE, KVPRESS: "other"}),
        named("other"),
        named("packed", references={GENERATE: "full", "nobody": "absent"}),
    ]
    found: list[Turn] = []
    for number, step_s in enumerate([0.5, 1.0, 5.0]):
        small = measurement(step_s / (3 + number), policy_share=0.1 * number, kv_bytes=number)
        of_round = {
            GENERATE: measurement(step_s),
            "full": measurement(step_s / 2, policy_share=0.0, prefill_s=2.0),
            "small": small,
            "other": measurement(2 * step_s),
            "packed": measurement(step_s / 8, compile_s=[0.0, 7.0, 2.0][number]),
        }
        found += one_round(number, of_round)
    generate, full, small, other, packed = summarize(found, jobs_at(who), SIZE)
    spreads = [attrs.astuple(one.ratios[GENERATE]) for one in (generate, full, small)]
    assert spreads[:2] == [(1, 1, 1), (2, 2, 2)]
    assert spreads[2] == pytest.approx((4, 3, 5))
    assert packed.ratios[GENERATE].median == pytest.approx(4), "like stands beside like"
    assert list(packed.ratios) == [GENERATE], "who was not measured is not compared with"
    assert packed.compile_s == 7, "of the round with most"
    assert small.ratios[KVPRESS].median == pytest.approx(8)
    assert list(other.ratios) == [GENERATE]
    assert full.rounds == pytest.approx((8, 4, 0.8)), "two sequences in half the step's seconds"
    assert full.decode_tok_s == pytest.approx(4)
    assert small.policy_share == pytest.approx(0.1)
    assert generate.policy_share is None
    assert (full.budget, small.budget, small.kv_bytes) == (None, 16, 2)
    assert full.prefill_tok_s == pytest.approx((3 + 5) / 2.0)
    assert (full.step_ms, full.step_p95_ms) == pytest.approx((500, 500))
    spread = (full.mean_ms.median, full.mean_ms.low, full.mean_ms.high)
    assert spread == pytest.approx((500, 250, 2500))


def test_works_and_batches_have_ratios_of_their_own() -> None:
    """Speeds are compared at one work; at best batches, tokens count and not steps."""
    short, long = Decode(2, 10, 3), Decode(4, 20, 3)
    mine, theirs = named("mine"), named(GENERATE)
    other_batch = Decode(8, 20, 3)
    jobs = [Job(theirs, short), Job(mine, short), Job(theirs, long), Job(mine, other_batch)]
    at_4, at_8 = measurement(1.0, batch=4), measurement(1.0, batch=8)
    found = [
        *one_round(0, {GENERATE: measurement(3.0), "mine": measurement(1.0)}, short.name),
        *one_round(0, {GENERATE: at_4, "mine": at_8}, long.name),
    ]
    results = summarize(found, jobs, SIZE)
    assert [one.ratios[GENERATE].median for one in results] == pytest.approx([1, 3, 1, 2])
    assert [one.held for one in results] == [10, 10, 20, 20]
    assert [one.batch for one in results] == [2, 2, 4, 8]


def test_an_incomplete_round_does_not_count() -> None:
    jobs = jobs_at([named(GENERATE), named("full")])
    whole = one_round(0, {GENERATE: measurement(0.25), "full": measurement(0.25)})
    more = summarize([*whole, *one_round(1, {GENERATE: measurement(9.0)})], jobs, SIZE)
    assert [one.rounds for one in more] == [(8.0,), (8.0,)]
    assert summarize(whole[:1], jobs, SIZE) == []
    assert len(complete_rounds(whole, jobs)) == 1


def percentile(values: list[float], percent: float) -> float:
    """Between the two nearest of the sorted values, in proportion."""
    ordered = list(values)
    for i in range(len(ordered)):
        for j in range(i):
            if ordered[i] < ordered[j]:
                ordered[i], ordered[j] = ordered[j], ordered[i]
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


STEPS = st.lists(st.floats(1e-4, 10), min_size=1, max_size=200)


@given(STEPS)
def test_latencies_equal_a_plain_oracle(steps: list[float]) -> None:
    turns = one_round(0, {GENERATE: measurement(steps)})
    (found,) = summarize(turns, jobs_at([named(GENERATE)]), SIZE)
    assert found.step_ms == pytest.approx(1e3 * percentile(steps, 50))
    assert found.step_p95_ms == pytest.approx(1e3 * percentile(steps, 95))
    assert found.decode_tok_s == pytest.approx(2 * len(steps) / sum(steps))


@given(STEPS)
def test_a_curve_goes_through_all_steps(steps: list[float]) -> None:
    turns = one_round(0, {GENERATE: measurement(steps)})
    (found,) = summarize(turns, jobs_at([named(GENERATE)]), SIZE)
    places = [place for place, _ in found.curve]
    assert places == sorted(places)
    if len(steps) <= 64:
        assert places == [3 + i for i in range(len(steps))], "the third token, the fourth, ..."
        assert [ms for _, ms in found.curve] == pytest.approx([1e3 * one for one in steps])
        return
    assert len(places) == 64
    # Equal parts: of each, the middle of its steps and their median.
    edges = [round(i * len(steps) / 64) for i in range(65)]
    for (place, ms), first, last in zip(found.curve, edges, edges[1:], strict=False):
        assert place == 3 + (first + last - 1) / 2
        assert ms == pytest.approx(1e3 * percentile(steps[first:last], 50))


def test_the_share_of_the_limit_is_the_least_time_by_the_time() -> None:
    """Reading 1,000 bytes of weights takes 10 s, multiplying 2 x 2 x 250 takes 5 or 20."""
    mine = measurement(64.0, read_bytes=60)
    for speed, weights_s in ((200.0, 10), (50.0, 20)):
        limit = measurement(99.0, read_bytes=300, machine=Machine(100.0, speed))
        found = summarize(
            one_round(0, {LIMIT: limit, "mine": mine}), jobs_at([named(LIMIT), named("mine")]), SIZE
        )[1]
        assert found.limit_ms == pytest.approx(1e3 * (weights_s + 0.6))
        assert found.limit_share == pytest.approx((weights_s + 0.6) / 64)
        assert found.rows_mean == pytest.approx(60 / 10 / 2)
    narrow = named("mine", has_limit=False)
    turns = one_round(0, {LIMIT: limit, "mine": attrs.evolve(mine, rows_mean=9.0)})
    (_, found) = summarize(turns, jobs_at([named(LIMIT), narrow]), SIZE)
    assert (found.limit_ms, found.limit_share, found.rows_mean) == (None, None, 9.0)
    # A work at which the limit was not measured has that of another one.
    other = Job(named("mine"), Decode(4, 10, 3))
    turns = [
        *one_round(0, {LIMIT: limit}),
        *one_round(0, {"mine": attrs.evolve(mine, batch=4)}, other.work.name),
    ]
    (_, alone) = summarize(turns, [*jobs_at([named(LIMIT)]), other], SIZE)
    assert alone.limit_ms == pytest.approx(1e3 * (2 * 4 * 250 / 50 + 0.6))


def test_a_policy_costs_what_the_first_does_not() -> None:
    who = [
        named("oldest", references={FIRST_PLAN: "oldest"}),
        named("mine", references={FIRST_PLAN: "oldest"}),
    ]
    found: list[Turn] = []
    for number, step_s in enumerate([4.0, 5.0, 8.0]):
        of_round = {
            "oldest": measurement(3.0),
            "mine": measurement([step_s, step_s, step_s], compacted=(0, 0, 0)),
        }
        found += one_round(number, of_round)
    oldest, mine = summarize(found, jobs_at(who), SIZE)
    assert mine.policy_cost is not None
    assert attrs.astuple(mine.policy_cost) == pytest.approx((2 / 5, 1 / 4, 5 / 8))
    assert oldest.policy_cost is not None
    assert oldest.policy_cost.median == 0
    assert mine.compacting_ratio is None, "no step compacts"
    # At batches of their own, the difference says nothing about the policy.
    jobs = [Job(who[0], Decode(1, 10, 3)), Job(who[1], Decode(2, 10, 3))]
    alone = attrs.evolve(of_round["oldest"], batch=1)
    turns = one_round(0, of_round | {"oldest": alone}, "10 held")
    assert [one.policy_cost is None for one in summarize(turns, jobs, SIZE)] == [False, True]


def test_steps_that_compact_are_compared_with_the_others() -> None:
    steps = measurement([1.0, 5.0, 2.0, 7.0, 3.0], compacted=(0, 2, 0, 1, 0))
    (found,) = summarize(one_round(0, {"mine": steps}), jobs_at([named("mine")]), SIZE)
    assert found.compacting_ratio is not None
    assert found.compacting_ratio.median == 6.0 / 2.0
    assert found.compactions == 3


def test_prompts_have_results_of_their_own_beside_the_models_forward() -> None:
    def brings(name: str) -> Contender:
        references = {FORWARD: FORWARD}
        return Contender(name, prefill=lambda _: measurement(1.0), references=references)

    prompt = Prefill(300)
    jobs = [*jobs_at([named("x")]), *jobs_at([brings(FORWARD), brings("mine")], prompt)]
    found: list[Turn] = []
    for number, (forward_s, mine_s) in enumerate([(1.0, 3.0), (2.0, 4.0), (4.0, 4.0)]):
        found += one_round(number, {"x": measurement(1.0)})
        seconds = {FORWARD: measurement([forward_s]), "mine": measurement([mine_s], kv_bytes=7)}
        found += one_round(number, seconds, prompt.name)
    forward, mine = summarize_prefills(found, jobs)
    assert [one.name for one in summarize(found, jobs, SIZE)] == ["x"]
    assert forward.tok_s == pytest.approx(150)
    assert (mine.name, mine.num_tokens, mine.kv_bytes) == ("mine", 300, 7)
    assert attrs.astuple(mine.seconds) == (4, 3, 4)
    assert mine.over_forward is not None
    assert attrs.astuple(mine.over_forward) == (2, 1, 3)
    (alone,) = summarize_prefills(found, jobs[-1:])
    assert alone.over_forward == mine.over_forward, "it was measured, whoever is shown"
    rest = [turn for turn in found if turn.job[0] != FORWARD]
    assert summarize_prefills(rest, jobs[-1:])[0].over_forward is None
