"""What a trace costs: the misses of an eviction in a store of a capacity, without tensors."""

from collections.abc import Sequence
from random import Random

import attrs
import numpy as np

from kvpolicy import Block, BlockEviction, KVPolicyError
from kvpolicy_plugins.guard.bases import LRU, BlindOracle, following
from kvpolicy_plugins.guard.eviction import Guard
from kvpolicy_plugins.guard.markers import LMarker, Marker, PredictiveMarker
from kvpolicy_plugins.guard.offline import belady_labels, next_requests, with_noise
from kvpolicy_plugins.guard.predictors import ONLINE, Given, Predictor

OFFLINE = ("perfect", "normal", "lognormal", "labels", "given")
PREDICTORS = (*OFFLINE, *ONLINE)
NOISY = ("normal", "lognormal")

# Those that read no predictions, and those that do.
PLAIN = ("opt", "lru", "marker")
PREDICTING = (
    "unguarded",
    "guard",
    "guard_follow",
    "guard_unprotected",
    "lmarker",
    "predictive_marker",
)
ALGORITHMS = (*PLAIN, *PREDICTING)


@attrs.frozen
class Outcome:
    """What became of a trace.

    Attributes:
        hits: For each request, whether the block was stored.
        num_guards: Errors of the predictions at which a block was guarded.
    """

    hits: Sequence[bool] = attrs.field(repr=False)
    num_guards: int = 0

    @property
    def misses(self) -> int:
        """Requests whose block was not stored."""
        return len(self.hits) - sum(self.hits)


def simulate(trace: Sequence[Block], capacity: int, eviction: BlockEviction) -> Outcome:
    """Serve requests one by one from a store that may evict any block.

    Args:
        trace: The blocks in the order of their requests.
        capacity: Blocks that the store holds, at least 1.
        eviction: Built for this capacity, and not used before.
    """
    stored: dict[Block, None] = {}
    hits = []
    for block in trace:
        hits.append(block in stored)
        if block in stored:
            eviction.hit(block)
            continue
        if len(stored) == capacity:
            victim = eviction.choose(block, stored.keys())
            del stored[victim]
            eviction.evict(victim)
        stored[block] = None
        eviction.insert(block)
    return Outcome(hits, getattr(eviction, "num_guards", 0))


def optimal_misses(trace: Sequence[Block], capacity: int) -> int:
    """Misses of the optimum, which evicts the block whose next request is latest (Belady)."""
    exact = Given(next_requests(trace))
    eviction = BlindOracle(predictor=exact, capacity=capacity, rng=Random(0))
    return simulate(trace, capacity, eviction).misses


@attrs.frozen(kw_only=True)
class Prediction:
    """Where the predictions of a simulation come from.

    Attributes:
        name: One of `PREDICTORS`.
        sigma: Noise of ``normal`` in requests, of ``lognormal`` in the exponent.
        flip: Probability that one of ``labels`` is wrong.
        given: The predictions of ``given``.
    """

    name: str = "perfect"
    sigma: float = 0.0
    flip: float = 0.0
    given: Sequence[float] | None = attrs.field(default=None, repr=False)

    def __str__(self) -> str:
        details = {**dict.fromkeys(NOISY, self.sigma), "labels": self.flip}
        return f"{self.name}({details[self.name]:g})" if self.name in details else self.name

    def build(
        self, trace: Sequence[Block], exact: np.ndarray, capacity: int, seed: int, rng: Random
    ) -> str | Predictor:
        """The predictor of one simulation.

        Args:
            trace: The requests.
            exact: `next_requests` of the trace.
            capacity: Blocks of the store, for labels.
            seed: Seed of the noise.
            rng: The generator of the algorithm, which turns labels, too.
        """
        if self.name in ONLINE:
            return self.name
        if self.name == "given":
            if self.given is None:
                msg = "the trace holds no predictions; choose another predictor."
                raise KVPolicyError(msg)
            return Given(self.given)
        if self.name == "labels":
            labels = belady_labels(trace, exact, capacity)
            return Given(labels, gives_labels=True, flip=self.flip, rng=rng)
        lognormal = self.name == "lognormal"
        return Given(with_noise(exact, self.sigma, lognormal=lognormal, seed=seed))


@attrs.frozen(kw_only=True)
class Simulation:
    """A trace, and how it is simulated.

    Attributes:
        trace: The requests.
        relax_times: Knob of `Guard`.
        relax_prob: Knob of `Guard`.
        exact: `next_requests` of the trace.
    """

    trace: Sequence[Block] = attrs.field(repr=False)
    relax_times: int = 0
    relax_prob: float = 0.0
    exact: np.ndarray = attrs.field(
        init=False,
        repr=False,
        eq=False,
        default=attrs.Factory(lambda self: next_requests(self.trace), takes_self=True),
    )

    def run(self, algorithm: str, prediction: Prediction, capacity: int, seed: int) -> Outcome:
        """Simulate one algorithm.

        Args:
            algorithm: One of `ALGORITHMS`.
            prediction: Its predictions; not read by those of `PLAIN`.
            capacity: Blocks of the store.
            seed: Seed of the algorithm and of noise.
        """
        eviction = self._build(algorithm, prediction, capacity, seed)
        return simulate(self.trace, capacity, eviction)

    @staticmethod
    def is_random(algorithm: str, prediction: Prediction) -> bool:
        """Whether outcomes depend on the seed."""
        if algorithm == "unguarded":
            return prediction.name in (*NOISY, "labels")
        return algorithm not in ("opt", "lru")

    def _build(
        self, algorithm: str, prediction: Prediction, capacity: int, seed: int
    ) -> BlockEviction:
        rng = Random(seed)
        if algorithm == "opt":
            return BlindOracle(predictor=Given(self.exact), capacity=capacity, rng=rng)
        if algorithm == "lru":
            return LRU(capacity=capacity, rng=rng)
        if algorithm == "marker":
            return Marker(capacity=capacity, rng=rng)
        predictor = prediction.build(self.trace, self.exact, capacity, seed, rng)
        if algorithm == "unguarded":
            return following(predictor, capacity=capacity, rng=rng)
        if algorithm == "lmarker":
            return LMarker(predictor=predictor, capacity=capacity, rng=rng)
        if algorithm == "predictive_marker":
            return PredictiveMarker(predictor=predictor, capacity=capacity, rng=rng)
        if algorithm == "guard_unprotected":
            return Guard(predictor=predictor, protection=False, capacity=capacity, rng=rng)
        return Guard(
            predictor=predictor,
            relax_times=self.relax_times,
            relax_prob=self.relax_prob,
            follow_if_guarded=algorithm == "guard_follow",
            capacity=capacity,
            rng=rng,
        )
