"""CAOTE in plain loops: outputs with and without a row, in double precision.

Nothing here imports kvpolicy. ``masses`` are scores of the rows of one head, ``values`` its values.
"""

import math
from collections.abc import Sequence

from reference import Matrix, Vector


def output(masses: Sequence[float], values: Matrix) -> Vector:
    """The mean of the values, weighted by masses."""
    total = math.fsum(masses)
    if total == 0:
        return [0.0] * len(values[0])
    return [
        math.fsum(m * v[i] for m, v in zip(masses, values, strict=True)) / total
        for i in range(len(values[0]))
    ]


def change_without(masses: Sequence[float], values: Matrix, row: int) -> float:
    """Length of the change of the output if a row leaves: both outputs are computed."""
    others = [t for t in range(len(masses)) if t != row]
    after = output([masses[t] for t in others], [values[t] for t in others])
    return math.dist(output(masses, values), after)


def fast_change(masses: Sequence[float], values: Matrix, row: int) -> float:
    """The same by the formula, with the plain mean of the values as the output."""
    share = masses[row] / math.fsum(masses)
    mean = [math.fsum(column) / len(values) for column in zip(*values, strict=True)]
    return share / (1 - share) * math.dist(mean, values[row])


def one_by_one(
    masses: Sequence[float], values: Matrix, may_leave: Sequence[bool], budget: int
) -> list[int]:
    """Rows that stay if the row leaves each time that changes the output of those left least."""
    left = list(range(len(masses)))
    while len(left) > budget:
        of_left = [masses[t] for t in left], [values[t] for t in left]
        changes = {t: change_without(*of_left, i) for i, t in enumerate(left) if may_leave[t]}
        left.remove(min(changes, key=lambda t: (changes[t], t)))
    return left
