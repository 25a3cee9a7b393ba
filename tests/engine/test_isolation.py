"""The result of a sequence does not depend on the other sequences of its batch.

In double precision: batches of different shapes sum in different orders, and in fp32 that
rounding can change which of two rows of nearly equal score is evicted.
"""

import pytest
import torch
from compare import result_values
from hypothesis import given
from hypothesis import strategies as st
from strategies import plans, prompts, seeds
from tiny import FAMILIES, shared_model

from kvpolicy import Engine, Plan, Request, Sampling

NUM_LAYERS = 2
models = st.builds(
    shared_model,
    st.sampled_from(FAMILIES),
    seed=st.integers(0, 3),
    num_layers=st.just(NUM_LAYERS),
    dtype=st.just(torch.float64),
)
slots = st.integers(1, 5)
chunks = st.sampled_from([1, 3, 7, 512])
long_prompts = prompts(count=4, max_len=48)
evicting = plans(num_layers=NUM_LAYERS)


@given(models, long_prompts, evicting, slots, chunks)
def test_batched_sequence_equals_sequence_alone(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, slots: int, chunk: int
) -> None:
    engine = Engine(model, plan=plan, slots=slots, chunk=chunk)
    batch = engine.generate(prompts, max_new_tokens=12).results()
    for prompt, result in zip(prompts, batch, strict=True):
        (alone,) = engine.generate([prompt], max_new_tokens=12).results()
        assert result_values(result) == result_values(alone)


@pytest.mark.nightly
@given(models, long_prompts, evicting, slots, st.permutations(range(4)))
def test_results_do_not_depend_on_request_order(
    model: torch.nn.Module,
    prompts: list[list[int]],
    plan: Plan,
    slots: int,
    order: list[int],
) -> None:
    engine = Engine(model, plan=plan, slots=slots)
    first = engine.generate(prompts, max_new_tokens=14).results()
    second = engine.generate([prompts[i] for i in order], max_new_tokens=14).results()
    assert [result_values(first[i]) for i in order] == [result_values(result) for result in second]


@pytest.mark.nightly
@given(models, long_prompts, evicting, slots)
def test_second_run_equals_first(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, slots: int
) -> None:
    engine = Engine(model, plan=plan, slots=slots)
    first = engine.generate(prompts, max_new_tokens=14).results()
    second = engine.generate(prompts, max_new_tokens=14).results()
    assert [result_values(result) for result in first] == [
        result_values(result) for result in second
    ]


@given(models, long_prompts, evicting, st.lists(st.integers(1, 16), min_size=4, max_size=4))
def test_sequences_that_end_early_do_not_affect_others(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, lengths: list[int]
) -> None:
    requests = [
        Request(prompt, max_new_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    engine = Engine(model, plan=plan, slots=3)
    for request, result in zip(requests, engine.generate(requests).results(), strict=True):
        (alone,) = engine.generate([request]).results()
        assert result_values(result) == result_values(alone)


@given(models, long_prompts, evicting, seeds)
def test_samples_do_not_depend_on_other_sequences(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, seed: int
) -> None:
    samplings = [Sampling(temperature=t, top_p=0.9, seed=seed) for t in (0.0, 0.7, 1.0, 1.3)]
    engine = Engine(model, plan=plan, slots=3)
    batch = engine.generate(prompts, max_new_tokens=12, sampling=samplings).results()
    for prompt, sampling, result in zip(prompts, samplings, batch, strict=True):
        (alone,) = engine.generate([prompt], max_new_tokens=12, sampling=sampling).results()
        assert result_values(result) == result_values(alone)


@given(models, long_prompts, evicting, st.integers(1, 20))
def test_results_do_not_depend_on_chunk_size(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, chunk: int
) -> None:
    # Also with eviction: a slab is compacted when it is full, for any chunk size.
    answers = [
        Engine(model, plan=plan, slots=3, chunk=size).generate(prompts, max_new_tokens=8).results()
        for size in (chunk, 512)
    ]
    assert [result_values(one) for one in answers[0]] == [result_values(one) for one in answers[1]]
