"""Budgets of plans: so many rows, or a share of a stated length."""

import re
from fractions import Fraction

from kvpolicy.errors import BudgetError, PlanError

Budget = int | str

#: A share as it is written, for editors, too: ``"25%"``, ``"12.5%"``.
SHARE = r"^[0-9]+(\.[0-9]+)?%$"

#: The most rows or tokens a plan may speak of: far beyond any memory, and exact everywhere.
MOST = 2**31 - 1


def whole(value: object) -> int:
    """A count as it came; `TypeError` with a sentence if it is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{value!r} is not a count; write a whole number of tokens"
        raise TypeError(msg)
    if abs(value) > MOST:
        msg = f"{value} is more than can be counted here; write a number of up to {MOST:,}"
        raise TypeError(msg)
    return value


def budget(value: object) -> Budget:
    """A budget as it came; `TypeError` with a sentence if it is none."""
    if isinstance(value, str) and re.fullmatch(SHARE, value):
        return value
    if isinstance(value, (str, float)) or not isinstance(value, int) or isinstance(value, bool):
        msg = (
            f"{value!r} is not a count or a share; write a number of rows such as 128, or "
            '"25%" with length = TOKENS'
        )
        raise TypeError(msg)
    return whole(value)


def rows_of(value: Budget, length: int | None, name: str) -> tuple[int, str | None]:
    """The rows that a budget stands for.

    Args:
        value: Rows, or a share of ``length``.
        length: Tokens that shares are of, if the plan states them.
        name: Name of the plan, for messages.

    Returns:
        The rows, a share being rounded down, and what they are a share of, in words
        (``None`` for a count).

    Raises:
        PlanError: If there is no length for a share to be of.
        BudgetError: If a share comes to no row, or is more than all.
    """
    if isinstance(value, int):
        return value, None
    if length is None:
        msg = (
            f'{name} gives a budget of "{value}" of no stated length; write length = TOKENS '
            "into the plan, or --set length=TOKENS, or the budget as a number of rows"
        )
        raise PlanError(msg)
    if length < 1:
        msg = f"{name} states a length of {length}; at least 1 token is needed"
        raise PlanError(msg)
    share = Fraction(value.removesuffix("%")) / 100
    rows = int(share * length)
    if share > 1 or rows < 1:
        msg = (
            f'{name} gives a budget of "{value}" of {length:,} tokens, which is {rows:,} rows; '
            "between 1 and all of them are wanted"
        )
        raise BudgetError(msg)
    return rows, f"{value} of {length:,} tokens is {rows:,} rows"
