"""Means, proportions and paired differences with 95 % intervals, and tests of differences.

scipy is imported by the functions that use it: importing it takes as long as a small sweep.
"""

import math
import warnings
from collections.abc import Callable, Sequence

import attrs
import numpy as np

Z_95 = 1.959963984540054  # the normal distribution has 95 % of its mass within +- Z_95
RESAMPLES = 10_000
_VALUES_PER_BATCH = 1 << 20  # bounds the memory of a bootstrap


@attrs.frozen
class Interval:
    """A number measured on a sample, with its 95 % interval.

    Attributes:
        value: The number.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    value: float
    low: float
    high: float


def wilson(num_correct: int, n: int) -> Interval:
    """Estimate a proportion with Wilson's score interval.

    Unlike the textbook ``p +- 1.96 sqrt(p (1 - p) / n)``, it stays within 0 and 1 and has a width
    at 0 % and 100 %.

    Args:
        num_correct: Number of successes.
        n: Size of the sample, at least 1.
    """
    return _wilson(num_correct / n, n)


def pass_at_1(attempts: Sequence[Sequence[bool]]) -> Interval:
    """Estimate the probability that one attempt at one question is correct.

    Attempts at one question are correlated, so ten attempts at each of thirty questions are worth
    less than three hundred questions. The interval is Wilson's for the *effective* sample size
    (Kott and Carr 1997): the number of independent samples whose mean
    would vary as much as the mean over the questions does. It lies between the number of
    questions and the number of samples. With one attempt each, and where all attempts are
    correct or all are wrong, it is the number of questions.

    Args:
        attempts: Verdicts by question; at least one question with at least one attempt each.

    Returns:
        The mean over questions of the share of correct attempts, with its interval.
    """
    shares = [sum(tries) / len(tries) for tries in attempts]
    num_questions, num_samples = len(shares), sum(map(len, attempts))
    share = math.fsum(shares) / num_questions
    variance = math.fsum((one - share) ** 2 for one in shares) / num_questions**2
    if 0 < share < 1:
        effective = share * (1 - share) / variance if variance else num_samples
    else:
        effective = num_questions
    return _wilson(share, min(max(effective, num_questions), num_samples))


def mean(values: Sequence[float], *, least: float = -math.inf, most: float = math.inf) -> Interval:
    """Estimate a mean with the interval of Student's t, within the range of the quantity.

    Args:
        values: At least one number; the interval of a single number has no width.
        least: The least that the quantity can be, see `_within`.
        most: The most that it can be.
    """
    n = len(values)
    centre = math.fsum(values) / n
    if n == 1:
        return Interval(centre, centre, centre)
    variance = math.fsum((value - centre) ** 2 for value in values) / (n - 1)
    half = _t_95(n - 1) * math.sqrt(variance / n)
    return _within(Interval(centre, centre - half, centre + half), least, most)


def _t_95(freedom: int) -> float:
    """Student's t has 95 % of its mass within +- this; with few numbers the normal has too much."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def _within(found: Interval, least: float, most: float) -> Interval:
    """Cut an interval at the ends of the range that its quantity has.

    With few numbers, the interval of a mean of shares reaches beyond 0 or 1, and that of lengths
    or seconds below 0. What is cut off cannot be the true value, so that the rest contains it as
    often as the whole. A value out of the range stays in its interval.
    """
    low, high = max(found.low, least), min(found.high, most)
    return Interval(found.value, min(low, found.value), max(high, found.value))


def ratio(parts: Sequence[float], wholes: Sequence[float], *, least: float = -math.inf) -> Interval:
    """Estimate a ratio of two sums, such as loss per token over texts of different lengths.

    Args:
        parts: Numerators, one for each text.
        wholes: Denominators, one for each text; all above 0.
        least: The least that the ratio can be, as for `mean`.

    Returns:
        ``sum(parts) / sum(wholes)`` with the linearised interval, by Student's t. Texts vary, not
        tokens: tokens of one text are correlated.
    """
    n, whole = len(parts), math.fsum(wholes)
    value = math.fsum(parts) / whole
    if n == 1:
        return Interval(value, value, value)
    residuals = [part - value * size for part, size in zip(parts, wholes, strict=True)]
    variance = n / (n - 1) * math.fsum(residual**2 for residual in residuals)
    half = _t_95(n - 1) * math.sqrt(variance) / whole
    return _within(Interval(value, value - half, value + half), least, math.inf)


def paired_proportions(both: int, only_a: int, only_b: int, neither: int) -> Interval:
    """Estimate the difference of two proportions that were measured on the same items.

    The interval is Newcombe's (1998, method 10): Wilson's intervals of both proportions, combined
    with their correlation. It keeps a width with few or no discordant items, where a bootstrap
    has nothing to resample.

    Args:
        both: Items on which A and B succeed.
        only_a: Items on which only A succeeds.
        only_b: Items on which only B succeeds.
        neither: Items on which both fail; at least one of the four counts is above 0.

    Returns:
        The proportion of A minus that of B.
    """
    n = both + only_a + only_b + neither
    a, b = wilson(both + only_a, n), wilson(both + only_b, n)
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    covariance: float = both * neither - only_a * only_b
    if covariance > 0:  # continuity correction
        covariance = max(covariance - n / 2, 0)
    correlation = covariance / math.sqrt(margins) if margins else 0.0

    def joint_margin(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * correlation * x * y + y * y, 0.0))

    value = (only_a - only_b) / n
    low = value - joint_margin(a.value - a.low, b.high - b.value)
    high = value + joint_margin(a.high - a.value, b.value - b.low)
    return Interval(value, low, high)


def bootstrap_mean(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Estimate a mean with a bootstrap interval, whatever the distribution of the values.

    The interval is bias-corrected and accelerated (BCa; Efron 1987). It does not depend on the
    order of the values. Equal values, or a single one, give an interval without width.

    Args:
        values: At least one number; for a paired difference, the difference of each item.
        seed: Random seed for resampling.

    Returns:
        The mean and its interval; the ends are NaN if a value is infinite or NaN.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    if not np.isfinite(ordered).all():
        return Interval(sum(values) / len(values), math.nan, math.nan)
    largest = float(np.abs(ordered).max()) or 1.0
    decimals = 14 - math.ceil(math.log10(largest))

    def statistic(sample: np.ndarray, axis: int) -> np.ndarray:
        # Rounded, so that equal means are equal whatever the order of summation: BCa counts ties.
        return np.round(sample.mean(axis), decimals)

    return _bootstrap(math.fsum(values) / len(values), (ordered,), statistic, seed)


def bootstrap_ratio_difference(
    a: Sequence[tuple[float, float]],
    b: Sequence[tuple[float, float]],
    *,
    of_ratio: Callable[[float], float] = float,
    seed: int = 0,
) -> Interval:
    """Estimate one ratio of sums minus another over the same items, as `bootstrap_mean` does.

    Args:
        a: What each item adds to the numerator and to the denominator of the first ratio; the
            latter is above 0. At least one item.
        b: The same for the ratio that is subtracted, in the same order.
        of_ratio: Function applied to both ratios, such as the exponential.
        seed: Random seed for resampling.

    Returns:
        The difference and its interval, in which items vary; the ends are NaN if a number is
        infinite or NaN.
    """
    items = [(*of_a, *of_b) for of_a, of_b in zip(a, b, strict=True)]
    is_finite = np.isfinite(items).all()
    total = math.fsum if is_finite else sum  # fsum refuses infinite numbers of both signs
    part_a, whole_a, part_b, whole_b = (total(column) for column in zip(*items, strict=True))
    value = of_ratio(part_a / whole_a) - of_ratio(part_b / whole_b)
    if not is_finite:
        return Interval(value, math.nan, math.nan)
    convert = np.asarray if of_ratio is float else np.vectorize(of_ratio, otypes=[float])

    def statistic(*sums: np.ndarray, axis: int) -> np.ndarray:
        x, x_size, y, y_size = (part.sum(axis) for part in sums)
        return convert(x / x_size) - convert(y / y_size)

    return _bootstrap(value, tuple(np.asarray(sorted(items), dtype=float).T), statistic, seed)


def sign_test(num_above: int, num_below: int) -> float:
    """Exact two-sided sign test: the p-value of the split under a fair coin.

    For values that are correct or wrong, this is McNemar's exact test. Items on which both agree
    do not count.

    Args:
        num_above: Items on which the first series is better.
        num_below: Items on which the second series is better.

    Returns:
        The p-value; 1 if both series agree on all items.
    """
    from scipy.stats import binomtest

    n = num_above + num_below
    return float(binomtest(num_above, n).pvalue) if n else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of several tests after Holm (1979).

    Rejecting what stays below 5 % gives a false rejection with a probability of at most 5 %,
    however the tests depend on each other.

    Args:
        p_values: One for each test.

    Returns:
        The adjusted p-values, in the same order.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _wilson(share: float, n: float) -> Interval:
    z2 = Z_95 * Z_95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # For 0 and n successes the formula gives 0 and 1, except for the last bit of a double.
    low = centre - half if share > 0 else 0.0
    high = centre + half if share < 1 else 1.0
    return Interval(share, low, high)


def _bootstrap(
    value: float, data: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray], seed: int
) -> Interval:
    """BCa interval of a statistic of paired columns, ``[N]`` each."""
    n = len(data[0])
    if all((column == column[0]).all() for column in data):
        return Interval(value, value, value)
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # degenerate resamples are handled below
        found = stats.bootstrap(
            data,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=max(1, _VALUES_PER_BATCH // n),
            rng=np.random.default_rng(seed),
        )
    resampled = found.bootstrap_distribution
    if np.ptp(resampled) <= 1e-12 * max(abs(value), 1e-12):
        return Interval(value, value, value)
    low, high = found.confidence_interval
    if not math.isfinite(low) or not math.isfinite(high):  # BCa is undefined: plain percentiles
        low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(value, min(float(low), value), max(float(high), value))
