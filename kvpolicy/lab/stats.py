"""Means and proportions with the intervals that belong to them."""

import math
from collections.abc import Sequence

import attrs

Z_95 = 1.959963984540054  # the normal distribution has 95 % of its mass within +- Z_95


@attrs.frozen
class Estimate:
    """A number measured on a sample, with its 95 % interval.

    Attributes:
        value: What was measured.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    value: float
    low: float
    high: float


def wilson(num_correct: int, n: int) -> Estimate:
    """Estimate a proportion with Wilson's score interval.

    Unlike the textbook ``p +- 1.96 sqrt(p (1 - p) / n)`` it stays within 0 and 1 and keeps a
    width at 0 % and 100 %, where policies on an easy or hard budget often are.

    Args:
        num_correct: How many of the sample were right.
        n: Size of the sample, at least 1.

    Returns:
        The share that was right, and its 95 % interval.
    """
    share = num_correct / n
    z2 = Z_95 * Z_95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At 0 and at n right the formula gives 0 and 1, but for the last bit of a double.
    low = centre - half if num_correct > 0 else 0.0
    high = centre + half if num_correct < n else 1.0
    return Estimate(share, low, high)


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """Estimate by how much two series differ on the same items.

    What makes an item hard for both falls out, so that the interval is narrower than that of
    two separate means.

    Args:
        values: One number for each item.
        reference: The other series, in the same order.

    Returns:
        Mean of ``values - reference``, with its normal 95 % interval.
    """
    return mean([a - b for a, b in zip(values, reference, strict=True)])


def mean(values: Sequence[float]) -> Estimate:
    """Estimate a mean with the normal 95 % interval.

    Args:
        values: The sample, at least one number.

    Returns:
        The mean and its interval; of a single number, which tells nothing of the spread,
        the interval is that number.
    """
    n = len(values)
    centre = math.fsum(values) / n
    if n == 1:
        return Estimate(centre, centre, centre)
    variance = math.fsum((value - centre) ** 2 for value in values) / (n - 1)
    half = Z_95 * math.sqrt(variance / n)
    return Estimate(centre, centre - half, centre + half)
