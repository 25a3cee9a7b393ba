"""Batch grouping by prompt length."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from strategies import costly
from tiny import shared_model

from kvpolicy import Engine, Plan
from kvpolicy.state import WaitingRequest
from skipkv_plugin.grouping import SkipKVBatches


def batches(lengths: list[int], slots: int, **knobs: Any) -> list[list[int]]:
    """All batches, when each one ends before the next begins."""
    policy, admitted = SkipKVBatches(**knobs), []
    waiting = [WaitingRequest(number, length, 10) for number, length in enumerate(lengths)]
    while waiting:
        (group,) = policy.schedule(waiting, slots, 0)
        admitted.append(group)
        waiting = [one for one in waiting if one.id not in group]
    return admitted


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=25)


@given(lengths, st.integers(1, 6), st.integers(0, 8))
def test_batches_are_slices_of_the_requests_sorted_by_length(
    lengths: list[int], slots: int, batch_size: int
) -> None:
    size = min(batch_size or slots, slots)
    by_length = sorted(range(len(lengths)), key=lambda number: (lengths[number], number))
    assert batches(lengths, slots, batch_size=batch_size) == [
        by_length[first : first + size] for first in range(0, len(lengths), size)
    ]


@given(lengths, st.integers(1, 8))
def test_unsorted_batches_are_in_arrival_order(lengths: list[int], batch_size: int) -> None:
    admitted = batches(lengths, 8, batch_size=batch_size, by_length=False)
    assert [number for group in admitted for number in group] == list(range(len(lengths)))


def test_urgent_requests_are_in_the_first_batch() -> None:
    waiting = [WaitingRequest(0, 1, 9), WaitingRequest(1, 9, 9, 1), WaitingRequest(2, 5, 9, 1)]
    assert SkipKVBatches(batch_size=2).schedule(waiting, 3, 0) == [[2, 1]]
    assert SkipKVBatches(batch_size=2, by_length=False).schedule(waiting, 3, 0) == [[1, 2]]


def test_batch_waits_for_the_previous_one() -> None:
    waiting = [WaitingRequest(0, 4, 10)]
    assert SkipKVBatches(batch_size=2).schedule(waiting, 3, 1) == []
    assert SkipKVBatches().schedule(waiting, 3, 1) == [[0]]


@costly
@given(lengths, st.sampled_from([0, 2, 5]), st.booleans())
def test_grouping_does_not_change_tokens(
    lengths: list[int], batch_size: int, by_length: bool
) -> None:
    prompts = [[n % 50 + 1] * length for n, length in enumerate(lengths)]

    def tokens(*schedule: object) -> list[tuple[int, ...]]:
        plan = Plan.uniform("h2o", budget=16, buffer=8, schedule=schedule)
        run = Engine(shared_model(), plan=plan, slots=3).generate(prompts, max_new_tokens=5)
        return [result.tokens for result in run.results()]

    assert tokens(SkipKVBatches(batch_size=batch_size, by_length=by_length)) == tokens()


@given(lengths)
def test_sorted_batches_need_no_more_pads(lengths: list[int]) -> None:
    """Eq. 12: total number of pads in padded batches of four."""

    def num_pads(by_length: bool) -> int:
        groups = batches(lengths, 4, batch_size=4, by_length=by_length)
        longest = (max(lengths[n] for n in group) for group in groups)
        return sum(most * len(group) for most, group in zip(longest, groups, strict=True))

    # Only full batches, because a short last batch can need more pads.
    if len(lengths) % 4 == 0:
        assert num_pads(True) <= num_pads(False)
