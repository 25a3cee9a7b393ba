"""Dividing whole rows by weights: the sum is exact, and floors are respected."""

import math
from collections.abc import Sequence
from fractions import Fraction

from kvpolicy.errors import BudgetError


def largest_remainder(total: int, weights: Sequence[float], floors: Sequence[int]) -> list[int]:
    """Divide a total: each recipient gets its floor and a part of the rest by weight.

    The rest is divided by largest remainders (Hamilton's method) in exact fractions: each
    recipient gets the integer part of its quota; then those with the largest remainders, the
    earlier of two equal ones first, get one more. So of two recipients with equal floors the
    one with the larger weight never gets less, and a larger weight never makes the own part
    smaller.

    Args:
        total: Rows to divide.
        weights: One finite, non-negative weight each; if all are 0, all count the same.
        floors: The least that each may get.

    Returns:
        One integer each, their sum exactly ``total``.

    Raises:
        BudgetError: The floors alone exceed the total.
        ValueError: There are no weights, not as many as floors, or a weight is negative or
            not finite.
    """
    if not weights or len(weights) != len(floors):
        msg = f"{len(weights)} weights are given for {len(floors)} floors; expected one each"
        raise ValueError(msg)
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        msg = f"weights must be finite and not negative: {list(weights)}"
        raise ValueError(msg)
    rest = total - sum(floors)
    if rest < 0:
        msg = (
            f"{total} rows cannot be divided among {len(floors)} layers whose policies protect "
            f"{sum(floors)} rows together; raise the budget or lower their knobs"
        )
        raise BudgetError(msg)
    if not any(weights):
        weights = [1] * len(weights)
    fractions = [Fraction(weight) for weight in weights]
    quotas = [rest * fraction / sum(fractions) for fraction in fractions]
    whole = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda index: whole[index] - quotas[index])
    one_more = set(by_remainder[: rest - sum(whole)])
    return [floor + whole[index] + (index in one_more) for index, floor in enumerate(floors)]
