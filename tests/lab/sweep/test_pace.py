"""The share of a sweep's work that is done."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.sweep.pace import Pace


def test_a_batch_that_ends_at_once_counts_by_its_tokens_before_and_after() -> None:
    pace = Pace({"a": 10, "b": 10, "c": 20})
    pace.go_on("a", 500)
    assert pace.share is None, "how long a sample is, is not known yet"
    for _ in range(10):
        pace.end_sample("a", 100)
    assert pace.share == pytest.approx(1 / 4)
    pace.go_on("b", 500)  # half of the next cell
    assert pace.share == pytest.approx(3 / 8)


def test_the_first_samples_to_end_are_the_shortest() -> None:
    pace = Pace({"a": 100, "b": 300})
    pace.go_on("a", 10_000)
    pace.end_sample("a", 40)
    assert pace.share is not None
    assert pace.share < 1 / 4, "the others are longer than 100 tokens"
    for _ in range(99):
        pace.end_sample("a", 300)
    assert pace.share == pytest.approx(1 / 4)


def test_what_was_done_before_says_how_long_samples_are_and_is_no_work() -> None:
    pace = Pace({"a": 10}, [("a", 50)] * 6)
    assert pace.share is None
    pace.go_on("a", 100)
    assert pace.share == pytest.approx(100 / 200)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_the_share_lies_within_0_and_1_and_ends_at_1(
    lengths: list[int], data: st.DataObject
) -> None:
    pace = Pace({"a": len(lengths)})
    total = 0
    for length in lengths:
        total += length
        pace.go_on("a", data.draw(st.integers(0, sum(lengths))))
        pace.end_sample("a", length)
        share = pace.share
        assert share is None or 0 <= share <= 1
    assert (pace.share is None) == (not any(lengths))
    assert pace.share in (None, pytest.approx(1))
