"""Intervals: known values, and what must hold for every sample."""

import math
import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.statistics import Z_95, mean, pass_at_1, ratio, wilson


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


outcomes = st.lists(st.booleans(), min_size=1, max_size=6)


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_one_attempt_at_each_question_gives_wilsons_interval(right: list[bool]) -> None:
    found, plain = pass_at_1([[one] for one in right]), wilson(sum(right), len(right))
    assert attrs.astuple(found) == pytest.approx(attrs.astuple(plain))


@given(st.lists(outcomes, min_size=1, max_size=10))
def test_pass_at_1_is_the_mean_of_the_questions_within_its_interval(
    attempts: list[list[bool]],
) -> None:
    found = pass_at_1(attempts)
    assert found.value == pytest.approx(sum(sum(a) / len(a) for a in attempts) / len(attempts))
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1


@given(st.lists(outcomes, min_size=1, max_size=10), st.integers(2, 5))
def test_repeating_attempts_that_are_alike_tells_nothing_new(
    attempts: list[list[bool]], times: int
) -> None:
    """Questions that are always right or always wrong: as many as there are, however often."""
    once = pass_at_1([[tries[0]] for tries in attempts])
    often = pass_at_1([[tries[0]] * times for tries in attempts])
    assert attrs.astuple(often) == pytest.approx(attrs.astuple(once))


def test_attempts_that_vary_within_questions_tell_as_much_as_questions_would() -> None:
    """Half of each question's attempts are right: 40 samples, and no variance of questions."""
    found = pass_at_1([[True, False]] * 20)
    assert attrs.astuple(found) == pytest.approx(attrs.astuple(wilson(20, 40)))


def test_attempts_at_a_few_questions_are_worth_less_than_as_many_questions() -> None:
    attempts = [[True] * 9 + [False]] * 5 + [[False] * 9 + [True]] * 5
    few, many = pass_at_1(attempts), wilson(50, 100)
    assert few.value == many.value == 0.5
    assert few.low < many.low
    assert few.high > many.high


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 50)), min_size=2, max_size=20))
def test_a_ratio_is_that_of_the_sums_within_its_interval(pairs: list[tuple[float, int]]) -> None:
    found = ratio([a for a, _ in pairs], [b for _, b in pairs])
    assert found.value == pytest.approx(sum(a for a, _ in pairs) / sum(b for _, b in pairs))
    assert found.low <= found.value <= found.high


@given(st.lists(st.floats(0, 9), min_size=2, max_size=20), st.integers(1, 9))
def test_a_ratio_over_equal_wholes_is_a_mean(parts: list[float], whole: int) -> None:
    found, plain = ratio(parts, [whole] * len(parts)), mean([part / whole for part in parts])
    assert attrs.astuple(found) == pytest.approx(attrs.astuple(plain), abs=1e-9)


def test_the_interval_of_a_ratio_covers_the_truth_as_often_as_it_says() -> None:
    """Texts of unlike length whose losses vary: 1,000 samples of 60 texts."""
    rng, covered, truth = random.Random(0), 0, 0.5
    for _ in range(1000):
        sizes = [rng.randint(10, 100) for _ in range(60)]
        found = ratio([n * truth * rng.uniform(0.5, 1.5) for n in sizes], sizes)
        covered += found.low <= truth <= found.high
    assert 920 <= covered <= 975
