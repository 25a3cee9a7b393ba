"""Guard misses as its authors' code does, within its bounds, and never while predictions hold."""

import math
import pickle
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import attrs
import numpy as np
import pytest
import reference_guard
from golden_cases import Case, recorded_related
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_plugins.guard import instances
from kvpolicy_plugins.guard.bases import LRU, BlindOracle
from kvpolicy_plugins.guard.eviction import Guard
from kvpolicy_plugins.guard.markers import Marker, PredictiveMarker
from kvpolicy_plugins.guard.offline import belady_labels, next_requests, with_noise
from kvpolicy_plugins.guard.predictors import Given, Learned, Pleco, Popularity
from kvpolicy_plugins.guard.simulation import (
    Prediction,
    Simulation,
    optimal_misses,
    simulate,
)

from kvpolicy import Block, BlockEviction, load_block_eviction
from kvpolicy.errors import KnobError

traces = st.lists(st.integers(0, 9), min_size=1, max_size=80)
capacities = st.integers(1, 8)
seeds = st.integers(0, 2**20)


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def guard(trace: Sequence[int], predictions: Any, capacity: int, seed: int = 0) -> Guard:
    return Guard(predictor=Given(predictions), capacity=capacity, rng=Random(seed))


# What the authors' code recorded

BY_LABELS = {"OracleBin": 0.0, "OracleBin_flip03": 0.3}


def of_name(name: str, recorded: Prediction) -> tuple[str, Prediction, dict[str, Any]]:
    """The algorithm, the predictions and the knobs of a recorded name."""
    head, _, tail = name.partition("_")
    algorithm = {
        "BlindOracle": "unguarded",
        "LRB": "unguarded",
        "Guard": "guard",
        "GuardWithoutRandomEvict": "guard_follow",
        "GuardWithoutProtection": "guard_unprotected",
        "PredictiveMarker": "predictive_marker",
        "LMarker": "lmarker",
        "LRU": "lru",
        "Marker": "marker",
    }[head]
    if tail in BY_LABELS:
        return algorithm, Prediction(name="labels", flip=BY_LABELS[tail]), {}
    if tail in ("POPU", "PLECO"):
        return algorithm, Prediction(name=tail.lower()), {}
    if tail == "follow":
        return "guard_follow", recorded, {}
    knobs = {"relax_times_3": {"relax_times": 3}, "relax_prob_05": {"relax_prob": 0.5}, "": {}}
    return algorithm, recorded, knobs[tail]


def predictions_of(case: Case) -> Prediction:
    sigma = case.args["noise"]["reuse_dis_noise_sigma"]
    kind = "lognormal" if case.args["noise"].get("lognormal") else "normal"
    return Prediction(name=kind if sigma else "perfect", sigma=sigma)


@pytest.mark.few(1)
@recorded_related("guard")
def test_misses_equal_the_recorded_ones_for_every_algorithm_and_seed(case: Case) -> None:
    arrays = case.arrays()
    trace = arrays["trace"].tolist()
    names = [name[5:] for name in arrays if name.startswith("miss_")]
    assert len(names) >= 9
    for name in names:
        algorithm, prediction, knobs = of_name(name, predictions_of(case))
        simulation = Simulation(trace=trace, **knobs)
        found = [
            simulation.run(algorithm, prediction, case.args["k"], seed)
            for seed in case.args["seeds"]
        ]
        assert [one.misses for one in found] == arrays[f"miss_{name}"].tolist(), name
        if f"hits_{name}" in arrays:
            assert list(found[0].hits) == arrays[f"hits_{name}"].astype(bool).tolist()


@recorded_related("guard")
def test_predictions_equal_the_recorded_ones(case: Case) -> None:
    arrays, noise = case.arrays(), predictions_of(case)
    exact = next_requests(arrays["trace"].tolist())
    lognormal = noise.name == "lognormal"
    ours = with_noise(exact, noise.sigma, lognormal=lognormal, seed=case.args["seeds"][0])
    np.testing.assert_array_equal(ours.astype(np.float32), arrays["predictions_seed1000"])


# Oracles


@given(traces, capacities, seeds)
def test_guard_equals_the_loops_whatever_is_predicted(
    trace: list[int], capacity: int, seed: int
) -> None:
    # Few different values, so that many are equal.
    predictions = np.random.default_rng(seed).integers(0, 4, len(trace))
    outcome = simulate(trace, capacity, guard(trace, predictions, capacity, seed))
    expected = reference_guard.guard_hits(trace, predictions.tolist(), capacity, seed)
    assert list(outcome.hits) == expected


@given(traces, capacities)
def test_the_optimum_is_beladys(trace: list[int], capacity: int) -> None:
    assert optimal_misses(trace, capacity) == reference_guard.belady_misses(trace, capacity)


@given(traces)
def test_next_requests_are_those_of_the_trace(trace: list[int]) -> None:
    expected = [reference_guard.next_request(trace, now) for now in range(len(trace))]
    found = [min(time, reference_guard.NEVER) for time in next_requests(trace)]
    never = len(trace) + 1
    assert found == [never if time == reference_guard.NEVER else time for time in expected]


@given(traces, capacities)
def test_following_recency_is_lru(trace: list[int], capacity: int) -> None:
    recency = BlindOracle(predictor="recency", capacity=capacity, rng=Random(0))
    plain = LRU(capacity=capacity, rng=Random(0))
    assert simulate(trace, capacity, recency) == simulate(trace, capacity, plain)


@given(traces, capacities)
def test_label_1_marks_what_an_optimal_store_drops_before_it_returns(
    trace: list[int], capacity: int
) -> None:
    labels = belady_labels(trace, next_requests(trace), capacity)
    outcome = simulate(trace, capacity, guard(trace, next_requests(trace), capacity))
    assert sum(labels) == max(0, outcome.misses - min(capacity, len(set(trace))))
    for now, label in enumerate(labels):
        later = reference_guard.next_request(trace, now)
        if later < len(trace):
            assert outcome.hits[later] is not bool(label)


# What the paper promises


@pytest.mark.slow
def test_with_exact_predictions_guard_is_optimal_and_guards_nothing() -> None:
    rng = Random(7)
    for _ in range(3000):
        capacity = rng.randint(1, 8)
        pages = rng.randint(capacity, 2 * capacity + 2)
        trace = [rng.randrange(pages) for _ in range(rng.randint(1, 60))]
        outcome = simulate(trace, capacity, guard(trace, next_requests(trace), capacity))
        assert outcome.misses == reference_guard.belady_misses(trace, capacity)
        assert outcome.num_guards == 0


@pytest.mark.parametrize("capacity", [4, 16, 64])
def test_wrong_predictions_cost_4000_misses_without_guard_and_one_with_it(capacity: int) -> None:
    trace = instances.blow_up(capacity)
    worst = -next_requests(trace)
    unguarded = BlindOracle(predictor=Given(worst), capacity=capacity, rng=Random(0))
    assert simulate(trace, capacity, unguarded).misses == 3999 + capacity
    assert simulate(trace, capacity, guard(trace, worst, capacity)).misses == capacity + 2
    assert optimal_misses(trace, capacity) == capacity + 1


def phases_of(trace: Sequence[int], predictions: np.ndarray, capacity: int, seed: int) -> list[Any]:
    """Misses of each whole phase, and the blocks asked for in it that were not stored before it."""
    eviction = guard(trace, predictions, capacity, seed)
    stored: dict[int, None] = {}
    phases: list[list[Any]] = []  # [misses, what was stored before, what was asked for]
    for block in trace:
        before, is_hit = set(stored), block in stored
        if is_hit:
            eviction.hit(block)
        else:
            if len(stored) == capacity:
                victim = eviction.choose(block, stored.keys())
                if eviction.num_phases > len(phases):
                    phases.append([0, before, set()])
                del stored[victim]
                eviction.evict(victim)
            stored[block] = None
            eviction.insert(block)
        if phases:
            phases[-1][0] += not is_hit
            phases[-1][2].add(block)
    return [(misses, len(asked - before)) for misses, before, asked in phases[:-1]]


def hard_phases(capacity: int, num_phases: int, seed: int) -> list[int]:
    """Phases of one new block and all but one of the blocks before, in random order."""
    rng = Random(seed)
    blocks = list(range(capacity))
    trace = list(blocks)
    for phase in range(num_phases):
        rng.shuffle(blocks)
        blocks = [capacity + phase, *blocks[1:]]
        trace += blocks
    return trace


INSTANCES = {
    "uniform": lambda k, seed: np.random.default_rng(seed).integers(0, k + 1, 40 * k).tolist(),
    "cyclic": lambda k, seed: list(range(k + 1)) * 20,
    "hard phases": lambda k, seed: hard_phases(k, 30, seed),
    "shifting": lambda k, seed: [i // (3 * k) + v for i, v in enumerate(
        np.random.default_rng(seed).integers(0, k + 1, 30 * k).tolist())],
}  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("capacity", [2, 3, 4, 8])
@pytest.mark.parametrize("instance", INSTANCES)
def test_misses_of_a_phase_stay_below_the_bound_with_the_worst_predictions(
    instance: str, capacity: int
) -> None:
    bound = harmonic(capacity - 1) + 1
    excess = []
    for seed in range(60):
        trace = INSTANCES[instance](capacity, seed)
        predictions = -next_requests(trace)
        phases = phases_of(trace, predictions, capacity, seed)
        excess.append(sum(misses - bound * new for misses, new in phases))
        assert all(new >= 1 for _, new in phases)
    error = np.std(excess, ddof=1) / math.sqrt(len(excess))
    assert np.mean(excess) <= 3 * error


@pytest.mark.parametrize("instance", INSTANCES)
@pytest.mark.parametrize("capacity", [4, 8])
def test_misses_stay_below_the_competitive_ratio(instance: str, capacity: int) -> None:
    ratio = 2 * harmonic(capacity - 1) + 2
    misses, optimum = 0, 0
    for seed in range(20):
        trace = INSTANCES[instance](capacity, seed)
        predictions = -next_requests(trace)
        misses += simulate(trace, capacity, guard(trace, predictions, capacity, seed)).misses
        optimum += optimal_misses(trace, capacity)
    assert misses <= ratio * optimum


def test_without_random_evictions_hard_phases_cost_more() -> None:
    """What the ablation shows: random victims, not the guard alone, give the logarithm."""
    capacity, ratios = 16, {}
    trace = hard_phases(capacity, 60, seed=3)
    simulation = Simulation(trace=trace)
    worst = Prediction(name="given", given=(-next_requests(trace)).tolist())
    for algorithm in ("guard", "guard_follow", "unguarded", "marker"):
        runs = [simulation.run(algorithm, worst, capacity, seed).misses for seed in range(5)]
        ratios[algorithm] = np.mean(runs) / optimal_misses(trace, capacity)
    assert ratios["marker"] < ratios["guard"] < ratios["guard_follow"] < ratios["unguarded"]
    assert ratios["guard"] <= 2 * harmonic(capacity - 1) + 2 < ratios["unguarded"]


def test_guard_loses_little_at_mild_noise_and_wins_at_much() -> None:
    trace = instances.drifting_popularity(4000, 200, seed=1)
    simulation, capacity = Simulation(trace=trace), 32
    optimum = optimal_misses(trace, capacity)

    def ratio(algorithm: str, sigma: float) -> float:
        # Noise that multiplies the gaps, so that late predictions are the least certain.
        generator = np.random.default_rng(5)
        gaps = (simulation.exact - np.arange(len(trace))) * generator.lognormal(
            0, sigma, len(trace)
        )
        noisy = Prediction(name="given", given=(np.arange(len(trace)) + gaps).tolist())
        return simulation.run(algorithm, noisy, capacity, 0).misses / optimum

    assert ratio("guard", 0) == ratio("unguarded", 0) == 1
    assert ratio("guard", 1) < 1.1 * ratio("unguarded", 1)
    assert ratio("guard", 8) < 0.9 * ratio("unguarded", 8)
    assert (
        ratio("guard", 8)
        < 1.1 * simulation.run("marker", Prediction(), capacity, 0).misses / optimum
    )


# Stores that hold blocks back


@attrs.define
class Store:
    """A store in which some blocks are in use; checks what it is told."""

    capacity: int
    eviction: BlockEviction
    stored: set[Block] = attrs.field(factory=set)
    victims: list[Block] = attrs.field(factory=list)

    def ask(self, block: int, pinned: set[int]) -> None:
        if block in self.stored:
            self.eviction.hit(block)
            return
        if len(self.stored) == self.capacity:
            evictable = self.stored - pinned
            if not evictable:
                return
            victim = self.eviction.choose(block, evictable)
            assert victim in evictable
            self.victims.append(victim)
            self.stored.remove(victim)
            self.eviction.evict(victim)
        self.stored.add(block)
        self.eviction.insert(block)


NAMES = ["lru", "marker", "lmarker", "predictive_marker", "blind_oracle", "guard"]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), capacity=st.integers(1, 6), seed=seeds)
def test_no_block_in_use_is_evicted_and_the_seed_decides(
    name: str, data: st.DataObject, capacity: int, seed: int
) -> None:
    requests = data.draw(
        st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 9), max_size=5)))
    )
    victims = []
    for _ in range(2):
        store = Store(capacity, load_block_eviction(name, capacity=capacity, rng=Random(seed)))
        for block, pinned in requests:
            store.ask(block, pinned)
        victims.append(store.victims)
    assert victims[0] == victims[1]


@given(traces, st.integers(2, 6), seeds)
def test_a_guarded_block_stays_until_the_phase_ends(
    trace: list[int], capacity: int, seed: int
) -> None:
    predictions = np.random.default_rng(seed).integers(0, 4, len(trace))
    eviction = guard(trace, predictions, capacity, seed)
    stored: dict[int, None] = {}
    guarded: set[int] = set()
    for block in trace:
        if block in stored:
            eviction.hit(block)
            continue
        before = eviction.num_phases, eviction.num_guards
        if len(stored) == capacity:
            victim = eviction.choose(block, stored.keys())
            guarded = guarded if eviction.num_phases == before[0] else set()
            assert victim not in guarded
            guarded |= {block} if eviction.num_guards > before[1] else set()
            del stored[victim]
            eviction.evict(victim)
        stored[block] = None
        eviction.insert(block)


def test_blocks_that_a_store_drops_by_itself_are_no_errors() -> None:
    eviction = Guard(predictor=Given([0.0] * 9), capacity=2, rng=Random(0))
    for block in (0, 1):
        eviction.insert(block)
    victim = eviction.choose(2, {0, 1})
    eviction.evict(victim)
    eviction.insert(2)
    eviction.evict(2)  # dropped, not chosen
    eviction.insert(3)
    eviction.evict(eviction.choose(2, {1 - int(str(victim)), 3}))
    assert eviction.num_guards == 0


# Predictors


def num_bytes(predictor: object) -> int:
    """Bytes of what a predictor remembers."""
    return len(pickle.dumps(predictor))


@given(traces)
def test_popu_and_pleco_are_their_formulas(trace: list[int]) -> None:
    def weight(u: int) -> float:
        return (u + 10) ** -1.8 * math.exp(-u / 670)

    popu, pleco = Popularity(), Pleco()
    for now, block in enumerate(trace):
        time, past = now + 1, [i + 1 for i in range(now + 1) if trace[i] == block]
        assert popu.predict(block) == time + time / len(past)
        share = sum(weight(time - one + 1) for one in past)
        share /= sum(weight(u) for u in range(1, time + 1))
        assert pleco.predict(block) == pytest.approx(time + 1 / share - 1)


def test_pleco_reads_no_requests_that_weigh_nothing() -> None:
    ages = np.arange(1, 25_001)
    weights = (ages + 10) ** -1.8 * np.exp(-ages / 670)
    pleco = Pleco()
    # Every 100th request is for block 0, the newest one too; the others are for 99 blocks.
    predicted = [pleco.predict(now % 100) for now in range(1, 25_001)][-1]
    share = weights[::100].sum() / weights.sum()
    assert predicted == pytest.approx(25_000 + 1 / share - 1, rel=1e-15)
    before = num_bytes(pleco)
    for now in range(25_001, 30_001):
        pleco.predict(now % 100)
    assert num_bytes(pleco) <= 1.01 * before, "what weighs nothing is forgotten"


def test_the_learned_predictor_learns_which_blocks_return_and_when() -> None:
    """Two blocks that return after 3 and 30 requests, among others that never do."""
    learned, fresh = Learned(window=200), iter(range(100, 10**6))
    errors = []
    for now in range(3000):
        block = 0 if now % 30 == 0 else 1 if now % 3 == 1 else next(fresh)
        predicted = learned.predict(block) - (now + 1)
        if now > 2000:
            true = {0: 30, 1: 3}.get(block, 400)
            errors.append(abs(math.log(predicted / true)))
    assert np.mean(errors) < 0.25


def test_the_memory_of_the_learned_predictor_is_bounded() -> None:
    learned, sizes = Learned(window=50), []
    for block in range(1500):
        learned.predict(block)
        sizes.append(num_bytes(learned))
    assert max(sizes[1000:]) <= 1.02 * max(sizes[400:600])


def test_the_learned_predictor_equals_ridge_regression() -> None:
    window = 1000
    learned, pairs = Learned(window=window), []
    asked: dict[int, list[int]] = {}
    latest: dict[int, list[float]] = {}
    prior = np.array([0.0, 1, 0, 0, 0, 0])  # the last gap again
    for time, block in enumerate(Random(0).choices(range(6), k=60), 1):
        times = asked.setdefault(block, [])
        if times:
            pairs.append((latest[block], math.log(time - times[-1])))
        times.append(time)
        gaps = [after - before for before, after in pairwise(times)][::-1][:3]
        logs = [math.log(gap) for gap in gaps] or [math.log(window)]
        logs += [logs[-1]] * (3 - len(logs))
        features = latest[block] = [1.0, *logs, len(gaps), math.log(len(times))]
        x, y = np.reshape([f for f, _ in pairs], (-1, 6)), np.array([t for _, t in pairs])
        weights = np.linalg.solve(x.T @ x + np.eye(6), x.T @ y + prior)
        expected = time + math.exp(min(weights @ features, math.log(4 * window)))
        assert learned.predict(block) == pytest.approx(expected)


# Knobs


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"relax_times": -1}, "relax_times=-1"),
        ({"relax_times": True}, "relax_times=True"),
        ({"relax_prob": 1.5}, "relax_prob=1.5"),
        ({"relax_times": 2, "relax_prob": 0.5}, "relax_prob"),
        ({"protection": False, "relax_times": 2}, "protection"),
        ({"predictor": "oracle"}, "predictor"),
        ({"follow": True}, "follow_if_guarded"),
    ],
)
def test_wrong_knobs_are_refused_and_named(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(KnobError, match=words):
        load_block_eviction("guard", capacity=4, rng=Random(0), **knobs)


def test_with_certain_relaxation_guard_is_unguarded() -> None:
    trace = Random(1).choices(range(12), k=300)
    worst = Prediction(name="given", given=(-next_requests(trace)).tolist())
    relaxed = Simulation(trace=trace, relax_prob=1.0).run("guard", worst, 5, 0)
    assert relaxed.hits == Simulation(trace=trace).run("unguarded", worst, 5, 0).hits


def test_counting_chains_makes_the_predictive_marker_evict_at_random() -> None:
    trace = hard_phases(16, 40, seed=0)
    worst = -next_requests(trace)
    misses = {
        count: simulate(
            trace,
            16,
            PredictiveMarker(
                predictor=Given(worst), count_chains=count, capacity=16, rng=Random(0)
            ),
        ).misses
        for count in (False, True)
    }
    assert misses[True] < misses[False]


def test_marker_evicts_no_marked_block_while_one_is_unmarked() -> None:
    marker = Marker(capacity=3, rng=Random(0))
    for block in (0, 1, 2):
        marker.insert(block)
    marker.hit(1)  # all were marked, so a phase begins
    assert marker.choose(3, {0, 1, 2}) in (0, 2)
    assert marker.choose(3, {1}) == 1
