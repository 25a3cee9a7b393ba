"""Two series measured on the same items: how far they differ, and whether chance might do that.

The tests are exact and the intervals drawn from a seed, so that the same samples always give
the same figures.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

from kvpolicy.lab.statistics import Estimate

DRAWS = 10_000
_LOW, _HIGH = 0.025, 0.975
_AT_ONCE = 1 << 20  # items drawn before they are summed: 8 MiB, a few times over
_DEARER = 16  # a count from a multinomial takes about so many times as long as drawing an item
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
        The mean and its interval; the ends are NaN if a value is infinite or NaN.
    """
    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).all():
        return Estimate(sum(values) / len(values), math.nan, math.nan)
    mean = math.fsum(values) / len(values)
    if np.all(array == array[0]):
        return Estimate(mean, mean, mean)
    means = _resampled_sums(array[:, None], seed, draws)[:, 0] / len(values)
    return _bca(mean, means, array - array.mean())


def bootstrap_ratios(
    ours: Sequence[tuple[float, float]],
    theirs: Sequence[tuple[float, float]],
    *,
    of_ratio: Callable[[float], float] = float,
    seed: int = 0,
    draws: int = DRAWS,
) -> Estimate:
    """Estimate one ratio of sums less another, over the same items, as `bootstrap_mean` does.

    Args:
        ours: What each item adds to both sums of the first ratio, to the one that is divided and
            to the one that it is divided by; the latter is above 0. At least one item.
        theirs: The same of the ratio that is subtracted, in the same order.
        of_ratio: What is taken of each ratio before, such as its exponential.
        seed: Of the resampling.
        draws: Resamples.

    Returns:
        The difference of the two and its BCa interval, in which items vary. Of items that are
        all alike, or of one, it has no width; the ends are NaN if a number is infinite or NaN.
    """
    items = np.asarray([(*a, *b) for a, b in zip(ours, theirs, strict=True)], dtype=float)
    if not np.isfinite(items).all():
        value = float(_less(np.asarray([[sum(c) for c in items.T.tolist()]]), of_ratio)[0])
        return Estimate(value, math.nan, math.nan)
    totals = np.asarray([[math.fsum(column) for column in items.T]])
    value = float(_less(totals, of_ratio)[0])
    if np.all(items == items[0]):
        return Estimate(value, value, value)
    drawn = _less(_resampled_sums(items, seed, draws), of_ratio)
    left_out = _less(totals - items, of_ratio)
    return _bca(value, drawn, left_out.mean() - left_out)


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


def _resampled_sums(items: "np.ndarray", seed: int, draws: int) -> "np.ndarray":
    """Sums over resampled items; their order does not matter.

    Args:
        items: ``[N, C]``.
        seed: Of the resampling.
        draws: Resamples.

    Returns:
        ``[draws, C]``.
    """
    rng = np.random.default_rng(seed)
    distinct, counts = np.unique(items, axis=0, return_counts=True)
    step = max(1, _AT_ONCE // len(items))
    sizes = [min(step, draws - done) for done in range(0, draws, step)]
    return np.concatenate([_times_drawn(rng, counts, size) @ distinct for size in sizes])


def _times_drawn(rng: np.random.Generator, counts: "np.ndarray", size: int) -> "np.ndarray":
    """How often each of K distinct items is drawn, in each of some resamples.

    Args:
        rng: What draws.
        counts: How many there are of each, ``[K]``.
        size: Resamples.

    Returns:
        ``[size, K]``.
    """
    n, k = int(counts.sum()), len(counts)
    if k * _DEARER < n:
        return rng.multinomial(n, counts / n, size)
    which = np.repeat(np.arange(k), counts)[rng.integers(n, size=(size, n))]
    places = which + k * np.arange(size)[:, None]
    return np.bincount(places.ravel(), minlength=size * k).reshape(size, k)


def _less(sums: "np.ndarray", of_ratio: Callable[[float], float]) -> "np.ndarray":
    """Of each row of four sums, the first ratio less the second.

    Args:
        sums: ``[K, 4]``.
        of_ratio: What is taken of each ratio.

    Returns:
        ``[K]``.
    """
    ours, theirs = sums[:, 0] / sums[:, 1], sums[:, 2] / sums[:, 3]
    pairs = zip(ours.tolist(), theirs.tolist(), strict=True)
    return np.asarray([of_ratio(a) - of_ratio(b) for a, b in pairs])


def _bca(value: float, drawn: "np.ndarray", influences: "np.ndarray") -> Estimate:
    """The interval of a value, from what resamples give for it.

    Args:
        value: What the items themselves give.
        drawn: What resamples of them give, ``[draws]``.
        influences: By how much the value falls when an item is left out, ``[N]``, less the mean
            of that; only their proportions count.
    """
    drawn = np.sort(drawn)
    shift, skew = _bias(drawn, value), _acceleration(influences)
    low, high = (_quantile(drawn, _adjusted(level, shift, skew)) for level in (_LOW, _HIGH))
    return Estimate(value, min(low, value), max(high, value))


def _bias(drawn: "np.ndarray", value: float) -> float:
    """By how many standard deviations the resamples' median misses the value; ties count half."""
    near = np.isclose(drawn, value, rtol=1e-12, atol=1e-12)
    below = np.count_nonzero((drawn < value) & ~near) + np.count_nonzero(near) / 2
    # Never 0 or 1, whose quantiles are infinite.
    return _NORMAL.inv_cdf((below + 0.5) / (len(drawn) + 1))


def _acceleration(influences: "np.ndarray") -> float:
    """A sixth of the skewness of the value, from the jackknife."""
    spread = float(np.sum(influences**2))
    return float(np.sum(influences**3)) / (6 * spread**1.5) if spread else 0.0


def _adjusted(level: float, shift: float, skew: float) -> float:
    """The level whose percentile is the end of the BCa interval."""
    moved = shift + _NORMAL.inv_cdf(level)
    return _NORMAL.cdf(shift + moved / (1 - skew * moved))


def _quantile(drawn: "np.ndarray", level: float) -> float:
    place = int(level * (len(drawn) + 1)) - 1
    return float(drawn[min(max(place, 0), len(drawn) - 1)])
