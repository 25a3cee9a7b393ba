"""Without eviction, the engine generates exactly the tokens of ``model.generate``."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, prompts, roomy_plans, seeds
from tiny import FAMILIES, greedy_tokens, shared_model, tiny_model

from kvpolicy import Engine, Plan, Request, Sampling

NUM_LAYERS = 3
NEW_TOKENS = 11
ROOMY = 64  # rows: more than any prompt and its continuation


def models_of(dtype: torch.dtype) -> st.SearchStrategy[torch.nn.Module]:
    return st.builds(
        shared_model,
        st.sampled_from(FAMILIES),
        seed=st.integers(0, 3),
        num_layers=st.just(NUM_LAYERS),
        num_kv_heads=st.sampled_from([1, 2, 4]),
        dtype=st.just(dtype),
    )


models, doubles = models_of(torch.float32), models_of(torch.float64)
slots = st.integers(1, 5)
chunks = st.sampled_from([1, 2, 3, 7, 512])


@costly
@given(models, prompts(), roomy_plans(num_layers=NUM_LAYERS, rows=ROOMY), slots, chunks)
def test_unexceeded_budget_equals_generate(
    model: torch.nn.Module, prompts: list[list[int]], plan: Plan, slots: int, chunk: int
) -> None:
    results = (
        Engine(model, plan=plan, slots=slots, chunk=chunk)
        .generate(prompts, max_new_tokens=NEW_TOKENS)
        .results()
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.tokens) == greedy_tokens(model, prompt, NEW_TOKENS)
        assert (result.compactions, result.rows_evicted) == (0, 0)
        assert result.finish_reason == "length"


@costly
@given(models, prompts(min_len=4, max_len=40), chunks)
def test_full_cache_equals_generate_for_any_chunk_size(
    model: torch.nn.Module, prompts: list[list[int]], chunk: int
) -> None:
    engine = Engine(model, plan=Plan.uniform("full"), slots=2, chunk=chunk)
    for prompt, result in zip(
        prompts, engine.generate(prompts, max_new_tokens=8).results(), strict=True
    ):
        assert list(result.tokens) == greedy_tokens(model, prompt, 8)


@costly
@given(models, prompts(count=4), st.permutations(range(4)), slots)
def test_requests_of_different_lengths_all_complete(
    model: torch.nn.Module, prompts: list[list[int]], lengths: list[int], slots: int
) -> None:
    requests = [
        Request(prompt, max_new_tokens=1 + 5 * length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    engine = Engine(model, plan=Plan.uniform("full"), slots=slots)
    for request, result in zip(requests, engine.generate(requests).results(), strict=True):
        expected = greedy_tokens(model, request.prompt, request.max_new_tokens)
        assert list(result.tokens) == expected


# In double precision no draw is so near to a limit between two tokens that rounding matters.
@costly
@given(doubles, prompts(count=3), seeds, slots)
def test_sampled_tokens_are_equal_under_any_unexceeded_budget(
    model: torch.nn.Module, prompts: list[list[int]], seed: int, slots: int
) -> None:
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=seed)
    answers = [
        Engine(model, plan=plan, slots=slots)
        .generate(prompts, max_new_tokens=10, sampling=sampling)
        .results()
        for plan in (Plan.uniform("full"), Plan.uniform("rkv", "protect", budget=64, buffer=3))
    ]
    assert [one.tokens for one in answers[0]] == [one.tokens for one in answers[1]]


def test_run_leaves_model_unchanged() -> None:
    model = shared_model("qwen3")
    before = (model.config.to_dict(), {k: v.clone() for k, v in model.state_dict().items()})
    Engine(model, plan=Plan.uniform("rkv", budget=12, buffer=2)).generate(
        [[1, 2, 3] * 8], max_new_tokens=4
    ).results()
    assert model.config.to_dict() == before[0]
    assert all(torch.equal(v, before[1][k]) for k, v in model.state_dict().items())
    assert greedy_tokens(model, [1, 2, 3], 4) == greedy_tokens(model, [1, 2, 3], 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_equals_generate(family: str) -> None:
    # bf16 logits are coarse and sums are ordered differently: one fixed example.
    model = tiny_model(family, dtype=torch.bfloat16, seed=1)
    prompt = [5, 9, 40, 2, 2, 7, 11]
    plan = Plan.uniform("streaming", budget=64)
    (result,) = Engine(model, plan=plan).generate([prompt], max_new_tokens=6).results()
    assert list(result.tokens) == greedy_tokens(model, prompt, 6)
