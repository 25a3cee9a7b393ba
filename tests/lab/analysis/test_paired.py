"""Paired statistics: equal to slow oracles, and true as often as they say."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.analysis.paired import bootstrap_mean, bootstrap_ratios, holm, sign_test
from kvpolicy.lab.statistics import Estimate, mean

# Resampling answers with one of finitely many means, and 10,000 draws know a share of 2.5 %
# to about 0.15 points; 0.6 is four times that.
LEVEL_TOLERANCE = 0.006


def exact_sign_test(above: int, below: int) -> Fraction:
    """Twice the sum of binomials of the thinner side, at most 1."""
    n = above + below
    tail = sum(Fraction(math.comb(n, k), 2**n) for k in range(min(above, below) + 1))
    return min(Fraction(1), 2 * tail)


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_sign_test_is_a_sum_of_binomials(above: int, below: int) -> None:
    found = sign_test(above, below)
    assert found == pytest.approx(float(exact_sign_test(above, below)), rel=1e-12)
    assert found == sign_test(below, above)
    assert 0 < found <= 1


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_sign_test_counts_coins_that_fall_at_least_as_unevenly(above: int, below: int) -> None:
    n = above + below
    extreme = abs(above - below)
    falls = [abs(2 * sum(coins) - n) >= extreme for coins in itertools.product((0, 1), repeat=n)]
    if n <= 12:
        assert sign_test(above, below) == pytest.approx(sum(falls) / len(falls))


def test_the_sign_test_gives_the_values_of_the_books() -> None:
    assert sign_test(0, 0) == 1
    assert sign_test(1, 0) == 1
    assert sign_test(0, 5) == 2 / 32
    assert sign_test(5, 5) == 1
    assert sign_test(121, 59) == pytest.approx(4.434e-6, rel=1e-3)
    assert sign_test(100_000, 0) == 0, "smaller than any double"


P_VALUES = st.lists(st.floats(0, 1, allow_subnormal=False), max_size=8)


@given(P_VALUES)
def test_holm_adjusts_as_its_definition_says(p_values: list[float]) -> None:
    """Adjusted is the least level at which Holm's steps, taken one by one, reject a test."""

    def rejected(level: float) -> set[int]:
        left = sorted(range(len(p_values)), key=lambda i: p_values[i])
        done: set[int] = set()
        for i in left:
            if p_values[i] * (len(p_values) - len(done)) > level:
                break
            done.add(i)
        return done

    for i, adjusted in enumerate(holm(p_values)):
        assert p_values[i] <= adjusted <= 1
        if adjusted < 1:
            assert i in rejected(adjusted)
        if adjusted > 0:
            assert i not in rejected(adjusted * (1 - 1e-9) if adjusted < 1 else 1 - 1e-9)


def test_holm_of_one_test_changes_nothing() -> None:
    assert holm([]) == []
    assert holm([0.03]) == [0.03]
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def all_means(values: list[float]) -> list[float]:
    """The mean of every resample there is, in order."""
    draws = itertools.product(values, repeat=len(values))
    return sorted(math.fsum(drawn) / len(values) for drawn in draws)


def normal(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def normal_inverse(p: float) -> float:
    low, high = -10.0, 10.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if normal(middle) < p else (low, middle)
    return low


def bca_levels(value: float, drawn: list[float], left_out: list[float]) -> list[float]:
    """Levels of the interval's ends by Efron's formulas (1987, 2.3 and 6.6), in plain loops.

    Args:
        value: What the items give.
        drawn: What every resample of them gives.
        left_out: What they give without one of them, for each of them.
    """
    below = sum(1.0 if m < value - 1e-9 else 0.5 * (m < value + 1e-9) for m in drawn)
    bias = normal_inverse(below / len(drawn))
    middle = math.fsum(left_out) / len(left_out)
    cubes = math.fsum((middle - one) ** 3 for one in left_out)
    squares = math.fsum((middle - one) ** 2 for one in left_out)
    skew = cubes / (6 * squares**1.5) if squares > 1e-18 else 0.0
    levels = []
    for level in (0.025, 0.975):
        moved = bias + normal_inverse(level)
        levels.append(normal(bias + moved / (1 - skew * moved)))
    return levels


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 7.0]), min_size=2, max_size=6))
def test_the_bootstrap_interval_is_that_of_all_resamples(values: list[float]) -> None:
    found = bootstrap_mean(values)
    assert found.value == pytest.approx(math.fsum(values) / len(values))
    assert found.low <= found.value <= found.high
    if len(set(values)) == 1:
        assert found.low == found.high
        return
    left_out = [(math.fsum(values) - value) / (len(values) - 1) for value in values]
    _check_ends(found, all_means(values), left_out)


def _check_ends(found: Estimate, drawn: list[float], left_out: list[float]) -> None:
    levels = bca_levels(found.value, drawn, left_out)
    for end, level in zip((found.low, found.high), levels, strict=True):
        if end == found.value:
            continue  # an end is never on the other side of the value
        up_to = sum(m <= end + 1e-9 for m in drawn) / len(drawn)
        under = sum(m < end - 1e-9 for m in drawn) / len(drawn)
        assert under - LEVEL_TOLERANCE <= level <= up_to + LEVEL_TOLERANCE


Text = tuple[int, int, int, int]  # loss and length under one plan, then under another


def less(texts: Sequence[Text], of_ratio: Callable[[float], float]) -> float:
    """One ratio of sums less another, in plain loops."""
    sums = [0, 0, 0, 0]
    for text in texts:
        for place in range(4):
            sums[place] += text[place]
    return of_ratio(sums[0] / sums[1]) - of_ratio(sums[2] / sums[3])


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(0, 4), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([float, math.exp]),
)
def test_the_difference_of_ratios_and_its_interval_are_those_of_all_resamples(
    texts: list[Text], of_ratio: Callable[[float], float]
) -> None:
    ours, theirs = [(a, b) for a, b, _, _ in texts], [(c, d) for _, _, c, d in texts]
    found = bootstrap_ratios(ours, theirs, of_ratio=of_ratio)
    assert found.value == pytest.approx(less(texts, of_ratio))
    assert found.low <= found.value <= found.high
    if len(set(texts)) == 1:
        assert found.low == found.high
        return
    drawn = [less(some, of_ratio) for some in itertools.product(texts, repeat=len(texts))]
    left_out = [less(texts[:i] + texts[i + 1 :], of_ratio) for i in range(len(texts))]
    _check_ends(found, drawn, left_out)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=20))
def test_ratios_over_equal_wholes_differ_by_the_mean_difference(
    values: list[tuple[int, int]],
) -> None:
    ours, theirs = [(a, 1.0) for a, _ in values], [(b, 1.0) for _, b in values]
    found, plain = bootstrap_ratios(ours, theirs), bootstrap_mean([a - b for a, b in values])
    assert found.value == pytest.approx(plain.value, abs=1e-12)
    if len({a - b for a, b in values}) == 1:
        assert found.high - found.low == pytest.approx(0, abs=1e-9)


def test_a_ratio_less_itself_is_nought() -> None:
    texts = [(3.0, 2.0), (5.0, 7.0), (1.0, 9.0)]
    assert bootstrap_ratios(texts, texts) == Estimate(0, 0, 0)


def test_the_interval_of_a_difference_of_ratios_covers_the_truth() -> None:
    """400 times 60 texts of unlike length; the second plan loses 0.1 nats a token more."""
    rng, covered = random.Random(5), 0
    for time in range(400):
        sizes = [rng.randint(10, 1000) for _ in range(60)]
        hard = [rng.uniform(0.5, 1.5) for _ in sizes]
        ours = [(n * (h + rng.gauss(0, 0.1)), n) for n, h in zip(sizes, hard, strict=True)]
        theirs = [(n * (h + 0.1 + rng.gauss(0, 0.1)), n) for n, h in zip(sizes, hard, strict=True)]
        found = bootstrap_ratios(ours, theirs, seed=time, draws=1000)
        covered += found.low <= -0.1 <= found.high
    assert 0.91 <= covered / 400 <= 0.98


NUMBERS = st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=30)


@given(NUMBERS, st.integers(0, 2**32))
def test_the_bootstrap_is_the_same_for_the_same_seed_and_whatever_the_order(
    values: list[float], seed: int
) -> None:
    shuffled = random.Random(seed).sample(values, len(values))
    assert bootstrap_mean(values, seed=seed, draws=200) == bootstrap_mean(
        shuffled, seed=seed, draws=200
    )


@given(NUMBERS)
def test_the_bootstrap_moves_and_grows_with_the_values(values: list[float]) -> None:
    plain = bootstrap_mean(values, draws=500)
    moved = bootstrap_mean([4 * value + 64 for value in values], draws=500)
    for name in ("value", "low", "high"):
        assert getattr(moved, name) == pytest.approx(4 * getattr(plain, name) + 64)


def test_many_unlike_values_are_drawn_in_parts() -> None:
    values = [random.Random(i).gauss(2, 1) for i in range(3000)]
    found, textbook = bootstrap_mean(values, draws=4000), mean(values)
    assert found.low == pytest.approx(textbook.low, abs=0.004)
    assert found.high == pytest.approx(textbook.high, abs=0.004)


def test_a_single_value_has_an_interval_of_no_width() -> None:
    found = bootstrap_mean([0.25])
    assert (found.low, found.value, found.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("shape", ["right or wrong", "skewed"])
def test_the_bootstrap_covers_the_truth_about_as_often_as_it_says(shape: str) -> None:
    """600 paired samples of 60 items; 95 % less what any bootstrap of 60 values lacks."""
    rng, covered, times = random.Random(3), 0, 600
    for time in range(times):
        if shape == "skewed":
            values, truth = [rng.expovariate(1) for _ in range(60)], 1.0
        else:
            pairs = [(rng.random() < 0.5, rng.random() < 0.7) for _ in range(60)]
            values, truth = [float(a) - float(b) for a, b in pairs], -0.2
        found = bootstrap_mean(values, seed=time, draws=1000)
        covered += found.low <= truth <= found.high
    assert 0.915 <= covered / times <= 0.975


@pytest.mark.parametrize("values", [[math.inf, 1.0], [math.inf, -math.inf], [math.nan, 2.0]])
def test_what_is_not_finite_has_no_interval(values: list[float]) -> None:
    ones = [(1.0, 1.0)] * len(values)
    parts = [(value, 1.0) for value in values]
    for found in (bootstrap_mean(values), bootstrap_ratios(parts, ones)):
        assert not math.isfinite(found.value)
        assert math.isnan(found.low)
        assert math.isnan(found.high)
