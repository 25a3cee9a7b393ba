"""Sharing whole rows by weights: nothing is lost to rounding, and floors are respected."""

import math
from collections.abc import Sequence
from fractions import Fraction

from kvpolicy.errors import BudgetError


def share(total: int, weights: Sequence[float], floors: Sequence[int]) -> list[int]:
    """Share a total: everyone gets a floor, and of the rest a part by weight.

    The rest is divided by largest remainders (Hamilton's method), computed in whole fractions:
    everyone gets the whole part of what is due, then those with the largest remainders, the
    earlier one of two equals, get one more. So of two with equal floors the one with the larger
    weight never gets less, and a larger weight never makes one's own share smaller.

    Args:
        total: Rows to share.
        weights: Finite and not negative, one for each; if all are 0, all count alike.
        floors: The least that each may get.

    Returns:
        One number for each, their sum exactly ``total``.

    Raises:
        BudgetError: If the floors alone exceed the total.
        ValueError: If there are no weights, not as many as floors, or a weight is negative or
            not finite.
    """
    if not weights or len(weights) != len(floors):
        msg = f"{len(weights)} weights are given for {len(floors)} floors; as many are wanted"
        raise ValueError(msg)
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        msg = f"weights must be finite and not negative: {list(weights)}"
        raise ValueError(msg)
    rest = total - sum(floors)
    if rest < 0:
        msg = (
            f"{total} rows cannot be shared among {len(floors)} layers whose policies protect "
            f"{sum(floors)} rows together; raise the budget or lower their knobs"
        )
        raise BudgetError(msg)
    if not any(weights):
        weights = [1] * len(weights)
    parts = [Fraction(weight) for weight in weights]
    due = [rest * part / sum(parts) for part in parts]
    whole = [math.floor(one) for one in due]
    by_remainder = sorted(range(len(due)), key=lambda place: whole[place] - due[place])
    lucky = set(by_remainder[: rest - sum(whole)])
    return [floor + whole[place] + (place in lucky) for place, floor in enumerate(floors)]
