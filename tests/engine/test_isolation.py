"""A sequence is answered as if it were alone, whatever stands beside, before or after it.

In double precision: batches of another shape add up in another order, and in fp32 that noise
may tip an eviction between two rows of almost equal score.
"""

import torch
from compare import told
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
def test_a_row_in_a_batch_equals_the_same_row_alone(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, slots: int, chunk: int
) -> None:
    engine = Engine(model, plan=plan, slots=slots, chunk=chunk)
    batch = engine.generate(prompts, max_new_tokens=20).results()
    for prompt, result in zip(prompts, batch, strict=True):
        (alone,) = engine.generate([prompt], max_new_tokens=20).results()
        assert told(result) == told(alone)


@given(models, long_prompts, evicting, slots, st.permutations(range(4)))
def test_the_order_of_arrival_does_not_matter(
    model: torch.nn.Module,
    prompts: list[list[int]],
    plan: Plan,
    slots: int,
    order: list[int],
) -> None:
    engine = Engine(model, plan=plan, slots=slots)
    first = engine.generate(prompts, max_new_tokens=14).results()
    second = engine.generate([prompts[i] for i in order], max_new_tokens=14).results()
    assert [told(first[i]) for i in order] == [told(result) for result in second]


@given(models, long_prompts, evicting, slots)
def test_a_second_run_equals_the_first(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, slots: int
) -> None:
    engine = Engine(model, plan=plan, slots=slots)
    first = engine.generate(prompts, max_new_tokens=14).results()
    second = engine.generate(prompts, max_new_tokens=14).results()
    assert [told(result) for result in first] == [told(result) for result in second]


@given(models, long_prompts, evicting, st.lists(st.integers(1, 16), min_size=4, max_size=4))
def test_neighbours_that_end_early_leave_no_trace(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, lengths: list[int]
) -> None:
    requests = [
        Request(prompt, max_new_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    engine = Engine(model, plan=plan, slots=3)
    for request, result in zip(requests, engine.generate(requests).results(), strict=True):
        (alone,) = engine.generate([request]).results()
        assert told(result) == told(alone)


@given(models, long_prompts, evicting, seeds)
def test_samples_of_a_row_do_not_depend_on_its_neighbours(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, seed: int
) -> None:
    how = [Sampling(temperature=t, top_p=0.9, seed=seed) for t in (0.0, 0.7, 1.0, 1.3)]
    engine = Engine(model, plan=plan, slots=3)
    batch = engine.generate(prompts, max_new_tokens=12, sampling=how).results()
    for prompt, sampling, result in zip(prompts, how, batch, strict=True):
        (alone,) = engine.generate([prompt], max_new_tokens=12, sampling=sampling).results()
        assert told(result) == told(alone)


@given(models, long_prompts, evicting, st.integers(1, 20))
def test_the_size_of_a_chunk_does_not_matter(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, chunk: int
) -> None:
    # Also where something leaves: a slab is compacted when it is full, however it filled.
    answers = [
        Engine(model, plan=plan, slots=3, chunk=size).generate(prompts, max_new_tokens=8).results()
        for size in (chunk, 512)
    ]
    assert [told(one) for one in answers[0]] == [told(one) for one in answers[1]]
