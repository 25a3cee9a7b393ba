"""Intervals: known values, and what must hold for every sample."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.stats import Z_95, mean, wilson


@pytest.mark.parametrize(
    ("num_correct", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (95, 100, 0.8882, 0.9785),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_wilson_gives_the_values_of_the_tables(
    num_correct: int, n: int, low: float, high: float
) -> None:
    found = wilson(num_correct, n)
    assert found.value == num_correct / n
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)


@given(st.integers(1, 2000), st.data())
def test_the_ends_of_wilsons_interval_solve_its_equation(n: int, data: st.DataObject) -> None:
    """Each end is the share whose own standard error just reaches what was seen."""
    num_correct = data.draw(st.integers(0, n))
    found = wilson(num_correct, n)
    assert 0 <= found.low <= found.value <= found.high <= 1
    for end in (found.low, found.high):
        error = Z_95 * math.sqrt(end * (1 - end) / n)
        assert abs(found.value - end) == pytest.approx(error, abs=1e-7)


@given(st.integers(1, 500), st.data())
def test_wilson_is_the_same_from_the_other_side(n: int, data: st.DataObject) -> None:
    num_correct = data.draw(st.integers(0, n))
    right, wrong = wilson(num_correct, n), wilson(n - num_correct, n)
    assert right.low == pytest.approx(1 - wrong.high)
    assert right.high == pytest.approx(1 - wrong.low)


def test_mean_has_the_textbook_interval() -> None:
    found = mean([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    half = 1.959964 * math.sqrt(32 / 7) / math.sqrt(8)
    assert found.value == 5.0
    assert found.low == pytest.approx(5 - half)
    assert found.high == pytest.approx(5 + half)


def test_a_single_number_has_no_spread_to_tell() -> None:
    found = mean([3.5])
    assert (found.low, found.value, found.high) == (3.5, 3.5, 3.5)


def test_equal_numbers_have_an_interval_of_no_width() -> None:
    found = mean([0.1] * 1000)
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(0.1)
