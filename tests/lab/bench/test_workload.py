"""Workloads: prompts of the lengths that were asked for."""

from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.bench.workload import Decode, Text


@given(st.integers(1, 9), st.integers(1, 50), st.integers(0, 50), st.integers(0, 99))
def test_prompts_span_the_requested_lengths(batch: int, low: int, more: int, seed: int) -> None:
    workload = Text(batch, low, low + more, new_tokens=3, seed=seed)
    prompts = workload.prompts(61)
    lengths = sorted(map(len, prompts))
    assert len(prompts) == batch
    assert lengths[0] == low
    assert lengths[-1] == (low + more if batch > 1 else low)
    assert prompts == workload.prompts(61)
    assert all(0 <= token < 61 for prompt in prompts for token in prompt)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 40), st.integers(0, 99))
def test_held_texts_begin_with_shorter_ones(batch: int, held: int, more: int, seed: int) -> None:
    """So that a cache of prefixes has most of a text after a shorter one was measured."""
    short = Decode(batch, held, 1, seed).prompts(61)
    long = Decode(batch, held + more, 1, seed).prompts(61)
    assert [len(prompt) for prompt in short] == [held] * batch
    assert [prompt[:held] for prompt in long] == short
