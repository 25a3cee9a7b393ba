"""Two series measured on the same items: how far they differ, and whether chance might do that.

The tests are exact and the intervals drawn from a seed, so that the same samples always give
the same figures.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from kvpolicy.lab.stats import Estimate

DRAWS = 10_000
_LOW, _HIGH = 0.025, 0.975
_AT_ONCE = 1 << 22  # numbers drawn before they are summed: 32 MiB
_NORMAL = NormalDist()


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, draws: int = DRAWS) -> Estimate:
    """Estimate a mean with a bootstrap interval that promises nothing about the values' shape.

    The 95 % interval is bias-corrected and accelerated (BCa; Efron 1987): percentiles of the
    means of resampled values, moved by how skewed the values are. Of a single value, or values
    that are all alike, it has no width, as there is nothing to vary.

    Args:
        values: The sample, at least one number; for a paired difference, one for each item.
        seed: Of the resampling.
        draws: Resamples.

    Returns:
        The mean and its interval.
    """
    array = np.asarray(values, dtype=float)
    mean = math.fsum(values) / len(values)
    if np.all(array == array[0]):
        return Estimate(mean, mean, mean)
    means = np.sort(_resampled_means(array, seed, draws))
    shift, skew = _bias(means, mean), _acceleration(array)
    low, high = (_quantile(means, _adjusted(level, shift, skew)) for level in (_LOW, _HIGH))
    return Estimate(mean, min(low, mean), max(high, mean))


def sign_test(num_above: int, num_below: int) -> float:
    """The exact two-sided sign test: how likely is so uneven a split, if a fair coin decides.

    Where values are right or wrong, this is McNemar's exact test of the items on which two
    series part. Items on which they agree tell nothing and are not counted.

    Args:
        num_above: Items on which the first series is better.
        num_below: Items on which the second one is.

    Returns:
        The p-value; 1 where they never part.
    """
    n, least = num_above + num_below, min(num_above, num_below)
    if 2 * least == n:
        return 1.0
    ways, splits = 0, 1  # splits with up to, and with just k items on one side
    for k in range(least + 1):
        ways += splits
        splits = splits * (n - k) // (k + 1)
    return 2 * ways / 2**n  # whole numbers, rounded once


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of several tests after Holm (1979).

    Rejecting what stays below 5 % makes even one false rejection at most 5 % likely, however
    the tests depend on each other.

    Args:
        p_values: One for each test.

    Returns:
        The adjusted ones, in the same order.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, so_far = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        so_far = max(so_far, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = so_far
    return adjusted


def _resampled_means(values: "np.ndarray", seed: int, draws: int) -> "np.ndarray":
    """Means of resamples: how often each distinct value is drawn decides them.

    Returns:
        ``[draws]``.
    """
    rng = np.random.default_rng(seed)
    distinct, counts = np.unique(values, return_counts=True)
    shares, n = counts / counts.sum(), len(values)
    step = max(1, _AT_ONCE // len(distinct))
    sizes = [min(step, draws - done) for done in range(0, draws, step)]
    return np.concatenate([rng.multinomial(n, shares, size) @ distinct / n for size in sizes])


def _bias(means: "np.ndarray", mean: float) -> float:
    """By how many standard deviations the resamples' median misses the mean; ties count half."""
    near = np.isclose(means, mean, rtol=1e-12, atol=1e-12)
    below = np.count_nonzero((means < mean) & ~near) + np.count_nonzero(near) / 2
    # Never 0 or 1, whose quantiles are infinite.
    return _NORMAL.inv_cdf((below + 0.5) / (len(means) + 1))


def _acceleration(values: "np.ndarray") -> float:
    """A sixth of the skewness of the mean, from the jackknife."""
    centred = values - values.mean()
    spread = float(np.sum(centred**2))
    return float(np.sum(centred**3)) / (6 * spread**1.5)


def _adjusted(level: float, shift: float, skew: float) -> float:
    """The level whose percentile is the end of the BCa interval."""
    moved = shift + _NORMAL.inv_cdf(level)
    return _NORMAL.cdf(shift + moved / (1 - skew * moved))


def _quantile(means: "np.ndarray", level: float) -> float:
    place = int(level * (len(means) + 1)) - 1
    return float(means[min(max(place, 0), len(means) - 1)])
