"""Intervals and tests: known values, slow oracles, and coverage."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_samples import CELLS, sample
from scipy import stats

from kvpolicy.lab.statistics import (
    Z_95,
    Interval,
    bootstrap_mean,
    bootstrap_ratio_difference,
    holm,
    mean,
    paired_proportions,
    pass_at_1,
    ratio,
    sign_test,
    wilson,
)
from kvpolicy.lab.tasks.likelihood import LOSS, NUM_SCORED, Agreement, Perplexity
from kvpolicy.lab.tasks.repetition import Repetition
from kvpolicy.lab.tasks.retention import Retention
from kvpolicy.lab.tasks.task import LENGTH, Column, Metric, mean_of


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
def test_wilson_gives_published_values(num_correct: int, n: int, low: float, high: float) -> None:
    found = wilson(num_correct, n)
    assert found.value == num_correct / n
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)


@given(st.integers(1, 2000), st.data())
def test_wilson_equals_scipy(n: int, data: st.DataObject) -> None:
    num_correct = data.draw(st.integers(0, n))
    expected = stats.binomtest(num_correct, n).proportion_ci(method="wilson")
    found = wilson(num_correct, n)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


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
def test_wilson_is_symmetric(n: int, data: st.DataObject) -> None:
    num_correct = data.draw(st.integers(0, n))
    found, mirrored = wilson(num_correct, n), wilson(n - num_correct, n)
    assert found.low == pytest.approx(1 - mirrored.high)
    assert found.high == pytest.approx(1 - mirrored.low)


def test_mean_has_the_textbook_interval() -> None:
    found = mean([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    half = 2.364624 * math.sqrt(32 / 7) / math.sqrt(8)  # t of 7 degrees of freedom
    assert found.value == 5.0
    assert found.low == pytest.approx(5 - half)
    assert found.high == pytest.approx(5 + half)


@pytest.mark.parametrize("n", [3, 6, 30])
def test_the_interval_of_a_mean_has_its_nominal_coverage(n: int) -> None:
    """4,000 samples of so few normal numbers."""
    rng, covered = random.Random(0), 0
    for _ in range(4000):
        found = mean([rng.gauss(1, 2) for _ in range(n)])
        covered += found.low <= 1 <= found.high
    assert 3750 <= covered <= 3850


def test_the_mean_of_a_single_number_has_no_width() -> None:
    found = mean([3.5])
    assert (found.low, found.value, found.high) == (3.5, 3.5, 3.5)


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_the_mean_of_shares_has_an_interval_of_shares(values: list[float]) -> None:
    column = mean_of("share", "share", "Share", lambda one: values[one.item], is_share=True)
    cell = CELLS[0]
    found = column.estimate([sample(cell, item) for item in range(len(values))])
    assert found is not None
    plain = mean(values)
    assert found.value == plain.value
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert (found.low, found.high) == (max(plain.low, 0), min(plain.high, 1))


METRICS: list[Metric] = [Agreement(), Perplexity(), Repetition(), Retention()]
NOT_NEGATIVE = [one for metric in METRICS for one in metric.columns if not one.is_share]


@pytest.mark.parametrize("column", [LENGTH, *NOT_NEGATIVE], ids=lambda one: one.name)
def test_intervals_of_two_examples_do_not_go_below_the_least_value(column: Column) -> None:
    least = {"loop_period": 1.0, "perplexity": 1.0}.get(column.name, 0.0)
    values = [{column.name: num, LOSS: num, NUM_SCORED: 10.0} for num in (1.0, 100.0)]
    few = [
        sample(CELLS[0], item, num_tokens=int(one[LOSS]), values=one)
        for item, one in enumerate(values)
    ]
    found = column.estimate(few)
    assert found is not None
    assert least == found.low < found.value < found.high


def test_quantities_of_either_sign_have_intervals_of_both() -> None:
    column = mean_of("change", "change", "Change")
    found = column.estimate(
        [sample(CELLS[0], item, values={"change": num}) for item, num in enumerate((1.0, 100.0))]
    )
    assert found is not None
    assert found.low < 0
    assert found == mean([1.0, 100.0])


def test_the_mean_of_equal_numbers_has_no_width() -> None:
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
def test_repeating_equal_attempts_adds_no_information(
    attempts: list[list[bool]], times: int
) -> None:
    """Questions that are always right or always wrong: as many as there are, however often."""
    once = pass_at_1([[tries[0]] for tries in attempts])
    often = pass_at_1([[tries[0]] * times for tries in attempts])
    assert attrs.astuple(often) == pytest.approx(attrs.astuple(once))


def test_attempts_that_vary_within_questions_count_like_questions() -> None:
    """Half of each question's attempts are right: 40 samples, and no variance of questions."""
    found = pass_at_1([[True, False]] * 20)
    assert attrs.astuple(found) == pytest.approx(attrs.astuple(wilson(20, 40)))


def test_attempts_at_few_questions_count_less_than_as_many_questions() -> None:
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


def test_the_interval_of_a_ratio_has_its_nominal_coverage() -> None:
    """Texts of unlike length whose losses vary: 1,000 samples of 60 texts."""
    rng, covered, truth = random.Random(0), 0, 0.5
    for _ in range(1000):
        sizes = [rng.randint(10, 100) for _ in range(60)]
        found = ratio([n * truth * rng.uniform(0.5, 1.5) for n in sizes], sizes)
        covered += found.low <= truth <= found.high
    assert 920 <= covered <= 975


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
    assert found == pytest.approx(sign_test(below, above), rel=1e-12)
    assert 0 < found <= 1


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_sign_test_counts_splits_at_least_as_uneven(above: int, below: int) -> None:
    n = above + below
    extreme = abs(above - below)
    falls = [abs(2 * sum(coins) - n) >= extreme for coins in itertools.product((0, 1), repeat=n)]
    if n <= 12:
        assert sign_test(above, below) == pytest.approx(sum(falls) / len(falls))


def test_the_sign_test_gives_textbook_values() -> None:
    assert sign_test(0, 0) == 1
    assert sign_test(1, 0) == 1
    assert sign_test(0, 5) == pytest.approx(2 / 32)
    assert sign_test(5, 5) == 1
    assert sign_test(121, 59) == pytest.approx(4.434e-6, rel=1e-3)
    assert sign_test(100_000, 0) == 0, "smaller than any double"


P_VALUES = st.lists(st.floats(0, 1, allow_subnormal=False), max_size=8)


@given(P_VALUES)
def test_holm_agrees_with_its_definition(p_values: list[float]) -> None:
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


def test_holm_gives_the_values_of_statsmodels() -> None:
    """``multipletests(p, method="holm")`` of statsmodels 0.15.0."""
    p_values = [0.0004, 0.0311, 0.012, 0.6, 0.012, 0.2, 0.049]
    expected = [0.0028, 0.1244, 0.072, 0.6, 0.072, 0.4, 0.147]
    assert holm(p_values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("only_a", "only_b", "expected"),
    [(1, 7, 0.0703125), (12, 2, 0.012939453125), (50, 8, 1.5702617754687068e-08), (0, 3, 0.25)],
)
def test_mcnemars_exact_test_gives_the_values_of_statsmodels(
    only_a: int, only_b: int, expected: float
) -> None:
    """``mcnemar(..., exact=True)`` of statsmodels 0.15.0; the first is Fagerland's example."""
    assert sign_test(only_a, only_b) == pytest.approx(expected)


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


def _check_ends(found: Interval, drawn: list[float], left_out: list[float]) -> None:
    levels = bca_levels(found.value, drawn, left_out)
    for end, level in zip((found.low, found.high), levels, strict=True):
        if end == found.value:
            continue  # an end is never on the other side of the value
        up_to = sum(m <= end + 1e-9 for m in drawn) / len(drawn)
        under = sum(m < end - 1e-9 for m in drawn) / len(drawn)
        assert under - LEVEL_TOLERANCE <= level <= up_to + LEVEL_TOLERANCE


Text = tuple[int, int, int, int]  # loss and length under one plan, then under another


def ratio_difference(texts: Sequence[Text], of_ratio: Callable[[float], float]) -> float:
    """One ratio of sums minus another, in plain loops."""
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
    found = bootstrap_ratio_difference(ours, theirs, of_ratio=of_ratio)
    assert found.value == pytest.approx(ratio_difference(texts, of_ratio))
    assert found.low <= found.value <= found.high
    if len(set(texts)) == 1:
        assert found.low == found.high
        return
    drawn = [
        ratio_difference(some, of_ratio) for some in itertools.product(texts, repeat=len(texts))
    ]
    left_out = [ratio_difference(texts[:i] + texts[i + 1 :], of_ratio) for i in range(len(texts))]
    _check_ends(found, drawn, left_out)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=20))
def test_ratios_over_equal_wholes_differ_by_the_mean_difference(
    values: list[tuple[int, int]],
) -> None:
    ours, theirs = [(a, 1.0) for a, _ in values], [(b, 1.0) for _, b in values]
    found, plain = (
        bootstrap_ratio_difference(ours, theirs),
        bootstrap_mean([a - b for a, b in values]),
    )
    assert found.value == pytest.approx(plain.value, abs=1e-12)
    if len({a - b for a, b in values}) == 1:
        assert found.high - found.low == pytest.approx(0, abs=1e-9)


def test_a_ratio_minus_itself_is_zero() -> None:
    texts = [(3.0, 2.0), (5.0, 7.0), (1.0, 9.0)]
    assert bootstrap_ratio_difference(texts, texts) == Interval(0, 0, 0)


@pytest.mark.nightly
def test_the_interval_of_a_difference_of_ratios_covers_the_truth() -> None:
    """80 times 60 texts of different lengths; the second plan loses 0.1 nats a token more."""
    rng, covered = random.Random(5), 0
    for time in range(80):
        sizes = [rng.randint(10, 1000) for _ in range(60)]
        hard = [rng.uniform(0.5, 1.5) for _ in sizes]
        ours = [(n * (h + rng.gauss(0, 0.1)), n) for n, h in zip(sizes, hard, strict=True)]
        theirs = [(n * (h + 0.1 + rng.gauss(0, 0.1)), n) for n, h in zip(sizes, hard, strict=True)]
        found = bootstrap_ratio_difference(ours, theirs, seed=time)
        covered += found.low <= -0.1 <= found.high
    assert 0.88 <= covered / 80 <= 1


NUMBERS = st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=30)


@given(NUMBERS, st.integers(0, 2**32))
def test_the_bootstrap_is_the_same_for_the_same_seed_and_whatever_the_order(
    values: list[float], seed: int
) -> None:
    shuffled = random.Random(seed).sample(values, len(values))
    assert bootstrap_mean(values, seed=seed) == bootstrap_mean(shuffled, seed=seed)


@given(NUMBERS)
def test_the_bootstrap_moves_and_grows_with_the_values(values: list[float]) -> None:
    plain = bootstrap_mean(values)
    moved = bootstrap_mean([4 * value + 64 for value in values])
    for name in ("value", "low", "high"):
        assert getattr(moved, name) == pytest.approx(4 * getattr(plain, name) + 64)


def test_many_values_are_resampled_in_batches() -> None:
    values = [random.Random(i).gauss(2, 1) for i in range(3000)]
    found, textbook = bootstrap_mean(values), mean(values)
    assert found.low == pytest.approx(textbook.low, abs=0.004)
    assert found.high == pytest.approx(textbook.high, abs=0.004)


def test_the_bootstrap_of_a_single_value_has_no_width() -> None:
    found = bootstrap_mean([0.25])
    assert (found.low, found.value, found.high) == (0.25, 0.25, 0.25)


@pytest.mark.nightly
def test_the_bootstrap_covers_the_true_mean_of_skewed_values() -> None:
    """300 samples of 60 values; 95 % minus what any bootstrap of 60 skewed values misses."""
    rng, covered, times = random.Random(3), 0, 300
    for time in range(times):
        values = [rng.expovariate(1) for _ in range(60)]
        found = bootstrap_mean(values, seed=time)
        covered += found.low <= 1.0 <= found.high
    assert 0.9 <= covered / times <= 0.98


@pytest.mark.parametrize("values", [[math.inf, 1.0], [math.inf, -math.inf], [math.nan, 2.0]])
def test_values_that_are_not_finite_have_no_interval(values: list[float]) -> None:
    ones = [(1.0, 1.0)] * len(values)
    parts = [(value, 1.0) for value in values]
    for found in (bootstrap_mean(values), bootstrap_ratio_difference(parts, ones)):
        assert not math.isfinite(found.value)
        assert math.isnan(found.low)
        assert math.isnan(found.high)


COUNTS = st.tuples(*[st.integers(0, 30)] * 4).filter(any)


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [
        # Airway hyper-responsiveness before and after a transplantation (Fagerland et al. 2014).
        ((1, 1, 7, 12), -0.507, -0.026),
        # Newcombe 1998, method 10, his first example.
        ((36, 12, 2, 0), 0.0569, 0.3404),
    ],
)
def test_the_paired_interval_gives_published_values(
    counts: tuple[int, int, int, int], low: float, high: float
) -> None:
    found = paired_proportions(*counts)
    assert found.value == pytest.approx((counts[1] - counts[2]) / sum(counts))
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-4)


def test_the_paired_interval_agrees_with_the_test_where_few_items_differ() -> None:
    """A bootstrap gives +1 to +8 points for three items of a hundred that all favour one side."""
    found = paired_proportions(95, 3, 0, 2)
    assert sign_test(3, 0) == 0.25
    assert found.low < 0 < found.high


@given(COUNTS)
def test_the_paired_interval_contains_the_difference_and_stays_within_its_range(
    counts: tuple[int, int, int, int],
) -> None:
    both, only_a, only_b, neither = counts
    found = paired_proportions(both, only_a, only_b, neither)
    assert found.value == (only_a - only_b) / sum(counts)
    assert -1 - 1e-12 <= found.low <= found.value <= found.high <= 1 + 1e-12
    assert found.high > found.low, "it has a width without discordant items, too"
    swapped = paired_proportions(both, only_b, only_a, neither)
    assert attrs.astuple(swapped) == pytest.approx((-found.value, -found.high, -found.low))


def outcomes_of(n: int) -> Iterator[tuple[int, int, int, int]]:
    """All ways to split n items into both, only A, only B, and neither."""
    for both in range(n + 1):
        for only_a in range(n + 1 - both):
            for only_b in range(n + 1 - both - only_a):
                yield both, only_a, only_b, n - both - only_a - only_b


@pytest.mark.parametrize(
    "probabilities",
    [(0.5, 0.05, 0.05, 0.4), (0.3, 0.3, 0.1, 0.3), (0.9, 0.04, 0.01, 0.05), (0.6, 0, 0.1, 0.3)],
    ids=["few discordant", "many discordant", "nearly all correct", "one-sided"],
)
def test_the_paired_interval_covers_the_true_difference(
    probabilities: tuple[float, ...],
) -> None:
    """Exact coverage for 25 items, summed over all outcomes."""
    n, truth, covered = 25, probabilities[1] - probabilities[2], 0.0
    for counts in outcomes_of(n):
        found = paired_proportions(*counts)
        if found.low <= truth <= found.high:
            ways = math.factorial(n) / math.prod(map(math.factorial, counts))
            covered += ways * math.prod(p**k for p, k in zip(probabilities, counts, strict=True))
    assert 0.93 <= covered <= 1


def test_values_equal_up_to_rounding_have_an_interval_without_width() -> None:
    found = bootstrap_ratio_difference([(0.1, 1), (0.3, 3)], [(0.7, 7), (0.1, 1)])
    assert found.high - found.low == pytest.approx(0, abs=1e-12)
