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
    return _wilson(num_correct / n, n)


def pass_at_1(attempts: Sequence[Sequence[bool]]) -> Estimate:
    """Estimate the chance that one attempt at one question is right.

    Attempts at one question are alike, so that ten attempts at each of thirty questions tell
    less than three hundred questions would. The interval is Wilson's with the *effective*
    number of samples (Kott and Carr 1997): that of independent ones whose mean would vary as
    much as the means of the questions do. It is never below the number of questions or above
    that of samples; with one attempt each it is just that, and so it is where all are right or
    all wrong, which leaves nothing to vary.

    Args:
        attempts: Of each question, which attempts were right; at least one question, and at
            least one attempt at each.

    Returns:
        The mean over the questions of the share that was right, and its 95 % interval.
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


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """Estimate a ratio of two sums, such as loss per token over texts of unlike length.

    Args:
        parts: What is divided, one number for each text.
        wholes: What it is divided by, likewise; all above 0.

    Returns:
        ``sum(parts) / sum(wholes)`` with the linearised 95 % interval, in which texts are what
        varies, not tokens: those of one text are alike.
    """
    n, whole = len(parts), math.fsum(wholes)
    value = math.fsum(parts) / whole
    if n == 1:
        return Estimate(value, value, value)
    residuals = [part - value * size for part, size in zip(parts, wholes, strict=True)]
    variance = n / (n - 1) * math.fsum(residual**2 for residual in residuals)
    half = Z_95 * math.sqrt(variance) / whole
    return Estimate(value, value - half, value + half)


def _wilson(share: float, n: float) -> Estimate:
    z2 = Z_95 * Z_95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At 0 and at n right the formula gives 0 and 1, but for the last bit of a double.
    low = centre - half if share > 0 else 0.0
    high = centre + half if share < 1 else 1.0
    return Estimate(share, low, high)


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
