"""Largest-remainder shares: exact sums, within one of the quota, never below a floor."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import BudgetError
from kvpolicy.toolkit.apportion import largest_remainder

weights = st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 1 / 3, 5e-324, 1e300])


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[float], list[int]]:
    num = draw(st.integers(1, 12))
    floors = draw(st.lists(st.integers(0, 40), min_size=num, max_size=num))
    spare = draw(st.integers(0, 12) | st.integers(0, 10_000))
    return sum(floors) + spare, draw(st.lists(weights, min_size=num, max_size=num)), floors


@given(cases())
def test_shares_sum_to_the_total_and_are_within_one_of_the_quota(case: tuple) -> None:
    total, weights, floors = case
    shares = largest_remainder(total, weights, floors)
    assert sum(shares) == total
    parts = [Fraction(weight) for weight in weights]
    if not any(parts):
        parts = [Fraction(1)] * len(weights)
    for got, part, floor in zip(shares, parts, floors, strict=True):
        quota = (total - sum(floors)) * part / sum(parts)
        assert type(got) is int
        assert got >= floor
        assert abs(got - floor - quota) < 1


@given(cases())
def test_larger_weight_never_gets_a_smaller_share_above_the_floor(case: tuple) -> None:
    total, weights, floors = case
    extra = [
        got - floor
        for got, floor in zip(largest_remainder(total, weights, floors), floors, strict=True)
    ]
    ranked = sorted(zip(weights, extra, strict=True), key=lambda pair: pair[0])
    for (smaller, first), (larger, second) in pairwise(ranked):
        assert first <= second or smaller == larger


@given(cases(), st.data(), st.floats(0, 1e6))
def test_raising_a_weight_never_lowers_its_share(
    case: tuple, data: st.DataObject, rise: float
) -> None:
    total, weights, floors = case
    index = data.draw(st.integers(0, len(weights) - 1))
    if not any(weights):
        return  # equal shares are a separate rule
    raised = [*weights]
    raised[index] += rise
    assert (
        largest_remainder(total, raised, floors)[index]
        >= largest_remainder(total, weights, floors)[index]
    )


@given(cases(), st.integers(-3, 3))
def test_only_ratios_of_weights_matter(case: tuple, power: int) -> None:
    total, weights, floors = case
    weights = [float(round(weight) % 1000) for weight in weights]
    scaled = [weight * 2.0**power for weight in weights]  # exact in binary
    assert largest_remainder(total, scaled, floors) == largest_remainder(total, weights, floors)


def test_ties_go_to_the_earlier_entry() -> None:
    assert largest_remainder(7, [1, 1], [0, 0]) == [4, 3]
    assert largest_remainder(8, [0, 0, 0], [1, 1, 1]) == [3, 3, 2]
    assert largest_remainder(10, [2, 1, 0], [1, 1, 1]) == [6, 3, 1]


@given(cases())
def test_floors_above_the_total_raise_with_both_sums(case: tuple) -> None:
    _, weights, floors = case
    floors = [floor + 1 for floor in floors]
    with pytest.raises(BudgetError, match=rf"{sum(floors) - 1} .*{sum(floors)}"):
        largest_remainder(sum(floors) - 1, weights, floors)


@pytest.mark.parametrize(
    ("weights", "floors"),
    [([], []), ([1.0], [1, 1]), ([-1.0], [1]), ([float("nan")], [1]), ([float("inf")], [1])],
)
def test_invalid_weights_raise(weights: list, floors: list) -> None:
    with pytest.raises(ValueError, match="weights"):
        largest_remainder(10, weights, floors)
