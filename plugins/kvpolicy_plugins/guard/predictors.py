"""When will a block be asked for again? Predictors that read the past only.

A predictor is told of every request, after it has been served, and answers with the time of the
next request for the same block. Times count requests from 0; only their order matters.
"""

import math
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np

from kvpolicy import Block


@runtime_checkable
class Predictor(Protocol):
    """Predicts for the block of each request.

    Attributes:
        gives_labels: Whether the answers are labels (1: an optimal store would evict the block
            before it is asked for again; 0: it would not) and not times.
    """

    gives_labels: bool

    def predict(self, block: Block, /) -> float:
        """The prediction for the block of the newest request; called once per request."""


@attrs.define(eq=False)
class Recency:
    """Blocks come back in the order in which they came: evicting the latest is LRU."""

    gives_labels = False
    _time: int = attrs.field(default=0, init=False)

    def predict(self, block: Block) -> float:
        """The negative time of the request."""
        self._time += 1
        return -self._time


@attrs.define(eq=False)
class Popularity:
    """POPU of the authors' benchmark: ``t + t / n`` for the ``n``-th request of a block at ``t``.

    Its memory grows with the number of different blocks.
    """

    gives_labels = False
    _time: int = attrs.field(default=0, init=False)
    _counts: dict[Block, int] = attrs.field(factory=dict, init=False)

    def predict(self, block: Block) -> float:
        """``t + t / n``, with ``t`` from 1."""
        self._time += 1
        count = self._counts.get(block, 0) + 1
        self._counts[block] = count
        return self._time + self._time / count


# All older requests together weigh less than the newest one's rounding error.
_PLECO_HORIZON = 20_000


@attrs.define(eq=False)
class Pleco:
    """PLECO: a block returns with the decayed share that its past requests have of all.

    ``p = sum_i w(t - t_i + 1) / sum_{u=1..t} w(u)`` over the requests ``t_i`` of the block, with
    ``w(u) = (u + 10)^-1.8 exp(-u / 670)``; the prediction is ``t + 1/p - 1``. The time of a call
    grows with the number of requests for the block among the last 20,000, the memory also with the
    number of different blocks.
    """

    gives_labels = False
    _time: int = attrs.field(default=0, init=False)
    _weights: list[float] = attrs.field(factory=list, init=False)
    _sum: float = attrs.field(default=0.0, init=False)
    _times: dict[Block, deque[int]] = attrs.field(factory=dict, init=False)

    def predict(self, block: Block) -> float:
        """``t + 1/p - 1``, with ``t`` from 1."""
        self._time += 1
        time = self._time
        if time <= _PLECO_HORIZON:
            weight = (time + 10) ** -1.8 * float(np.exp(-time / 670))
            self._weights.append(weight)
            self._sum += weight
        times = self._times.setdefault(block, deque())
        times.append(time)
        while time - times[0] >= _PLECO_HORIZON:
            times.popleft()
        share = sum(self._weights[time - before] for before in times) / self._sum
        return 1 / share + time - 1


_NUM_GAPS = 3
_RIDGE = 1.0


@attrs.define(eq=False)
class _Pending:
    """A prediction that has not come true yet."""

    block: Block
    time: int
    features: np.ndarray


@attrs.define(eq=False, kw_only=True)
class Learned:
    """A linear model of the logarithm of the next gap, learned while requests come in.

    Features of a request: the logarithms of the last three gaps between requests for the block
    (the oldest known one is repeated; none: that of ``window``), how many were known, and the
    logarithm of how often the block was asked for. The target is the logarithm of the gap to the
    next request; where ``window`` requests pass without one, it is twice the window, as in LRB
    (NSDI 2020), since a model that sees only blocks that return thinks that all of them return.
    Weights are those of ridge regression over all targets so far, by recursive least squares:
    exact, and without a learning rate. Blocks that do not return are forgotten.

    Attributes:
        window: Requests after which a block counts as not coming back.
    """

    gives_labels = False
    window: int = 4096
    _time: int = attrs.field(default=0, init=False)
    _gaps: dict[Block, deque[int]] = attrs.field(factory=dict, init=False)
    _counts: dict[Block, int] = attrs.field(factory=dict, init=False)
    _latest: dict[Block, _Pending] = attrs.field(factory=dict, init=False)
    _queue: deque[_Pending] = attrs.field(factory=deque, init=False)
    _weights: np.ndarray = attrs.field(init=False)
    _covariance: np.ndarray = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        num_features = _NUM_GAPS + 3
        self._weights = np.zeros(num_features)
        self._weights[1] = 1.0  # before anything is learned: the last gap again
        self._covariance = np.eye(num_features) / _RIDGE

    def predict(self, block: Block) -> float:
        """The time of the request plus the predicted gap."""
        self._time += 1
        before = self._latest.pop(block, None)
        if before is not None:
            gap = self._time - before.time
            self._gaps.setdefault(block, deque(maxlen=_NUM_GAPS)).appendleft(gap)
            self._learn(before.features, math.log(gap))
        self._expire()
        self._counts[block] = self._counts.get(block, 0) + 1
        now = _Pending(block, self._time, self._features(block))
        self._latest[block] = now
        self._queue.append(now)
        # No gap is longer than what `_expire` teaches by more than the model is wrong.
        log_gap = min(float(self._weights @ now.features), math.log(4 * self.window))
        return self._time + math.exp(log_gap)

    def _features(self, block: Block) -> np.ndarray:
        gaps = self._gaps.get(block, ())
        logs = [math.log(gap) for gap in gaps] or [math.log(self.window)]
        logs += [logs[-1]] * (_NUM_GAPS - len(logs))
        return np.array([1.0, *logs, len(gaps), math.log(self._counts[block])])

    def _expire(self) -> None:
        while self._queue and self._time - self._queue[0].time > self.window:
            oldest = self._queue.popleft()
            if self._latest.get(oldest.block) is oldest:
                self._forget(oldest)

    def _forget(self, pending: _Pending) -> None:
        """Learn that a block has not come back; what is known of it goes, so memory is bounded."""
        self._learn(pending.features, math.log(2 * self.window))
        for known in (self._latest, self._gaps, self._counts):
            known.pop(pending.block, None)

    def _learn(self, features: np.ndarray, target: float) -> None:
        """One step of recursive least squares."""
        projected = self._covariance @ features
        gain = projected / (1.0 + features @ projected)
        self._weights += gain * (target - self._weights @ features)
        self._covariance -= np.outer(gain, projected)


@attrs.define(eq=False)
class Given:
    """Predictions that are known before, one for each request in order.

    Attributes:
        values: The predictions.
        gives_labels: Whether they are labels.
        flip: Probability that a label is turned round.
        rng: Draws that; shared with the algorithm, as in the authors' code.
    """

    values: Any
    gives_labels: bool = False
    flip: float = 0.0
    rng: Random | None = None
    _next: int = attrs.field(default=0, init=False)

    def predict(self, block: Block) -> float:
        """The next prediction."""
        value = float(self.values[self._next])
        self._next += 1
        if self.flip and self.rng is not None and self.rng.random() < self.flip:
            return 1 - value
        return value


ONLINE: dict[str, Callable[[], Predictor]] = {
    "popu": Popularity,
    "pleco": Pleco,
    "recency": Recency,
    "learned": Learned,
}


def as_predictor(value: object) -> Predictor:
    """A knob as a predictor: the name of one that reads the past only, or an object.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, str) and value in ONLINE:
        return ONLINE[value]()
    if isinstance(value, Predictor):
        return value
    msg = f"predictor={value!r:.60} is not known; choose one of {', '.join(ONLINE)}"
    raise ValueError(msg)
