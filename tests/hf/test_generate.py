"""`custom_generate` and the pipeline return what a `PolicyCache` returns."""

from typing import Any

import pytest
import torch
from batches import generated_tokens, padded
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, plans, prompts
from tiny import shared_model, tiny_tokenizer
from torch import nn
from transformers import DynamicCache

from kvpolicy import Plan, PolicyCache, hf
from kvpolicy.compat import cache_argument, cache_in
from kvpolicy.errors import CacheError, KVPolicyError, PlanError

NUM_LAYERS = 2
PLAN = Plan.uniform("rkv", budget=12, buffer=4, knobs={"rkv": {"window_size": 4}})

models = st.builds(
    shared_model,
    seed=st.integers(0, 3),
    num_layers=st.just(NUM_LAYERS),
    dtype=st.just(torch.float64),
)


def model_and_tokenizer() -> tuple[Any, Any]:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<60>"
    return shared_model(num_layers=NUM_LAYERS, dtype=torch.float64), tokenizer


# custom_generate


@costly
@given(models, prompts(max_len=40), plans(num_layers=NUM_LAYERS))
def test_custom_generate_equals_policy_cache(
    model: nn.Module, prompts: list[list[int]], plan: Plan
) -> None:
    tokens = generated_tokens(model, prompts, 8, custom_generate=hf.generate, plan=plan)
    assert tokens == generated_tokens(model, prompts, 8, past_key_values=PolicyCache(model, plan))


def test_custom_generate_allocates_its_slabs_once() -> None:
    model, _ = model_and_tokenizer()
    answer = model.generate(
        **padded([[1, 2, 3] * 5]),
        custom_generate=hf.generate,
        plan=Plan.uniform("full"),
        max_new_tokens=60,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    cache = cache_in(answer)
    assert cache.report.tokens == (74,)
    assert {layer.slab.capacity for layer in cache.core.cache.layers} == {75}
    assert cache.core.cache.transient_bytes == 0


def test_custom_generate_continues_only_the_same_conversation() -> None:
    model, _ = model_and_tokenizer()
    caches = [PolicyCache(model, PLAN) for _ in range(2)]
    prompt = [1, 2, 3] * 6
    (first,) = generated_tokens(
        model, [prompt], 9, past_key_values=caches[0], custom_generate=hf.generate
    )
    assert [first] == generated_tokens(model, [prompt], 9, past_key_values=caches[1])
    text = [*prompt, *first, 7, 7]
    again = generated_tokens(
        model, [text], 9, past_key_values=caches[0], custom_generate=hf.generate
    )
    assert again == generated_tokens(model, [text], 9, past_key_values=caches[1])
    other = [[5, *[4] * 60]]
    with pytest.raises(CacheError, match="begin"):
        generated_tokens(model, other, 9, past_key_values=caches[0], custom_generate=hf.generate)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt_lookup_num_tokens": 3, "plan": PLAN}, CacheError, "does not support assisted"),
        ({}, KVPolicyError, "no plan"),
        ({"plan": Plan.uniform("rkv")}, PlanError, "no budget"),
    ],
)
def test_custom_generate_refuses_unsupported_options(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, _ = model_and_tokenizer()
    with pytest.raises(error, match=message):
        generated_tokens(model, [[1, 2, 3]], 5, custom_generate=hf.generate, **options)


@pytest.mark.parametrize("do_sample", [False, True])
def test_custom_generate_searches_with_beams(do_sample: bool) -> None:
    model, _ = model_and_tokenizer()
    options = {"num_beams": 3, "do_sample": do_sample, "num_return_sequences": 2}
    answers = []
    for own in ({"custom_generate": hf.generate, "plan": PLAN}, {}):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            own = own or cache_argument(PolicyCache(model, PLAN))
            answers.append(generated_tokens(model, [[1, 2, 3] * 6], 9, **options, **own))
    assert answers[0] == answers[1]


def test_custom_generate_refuses_a_non_empty_dynamic_cache() -> None:
    model, _ = model_and_tokenizer()
    other = DynamicCache()
    generated_tokens(model, [[1, 2, 3]], 5, past_key_values=other)
    with pytest.raises(CacheError, match="transformers"):
        generated_tokens(
            model,
            [list(range(12))],
            5,
            past_key_values=other,
            custom_generate=hf.generate,
            plan=PLAN,
        )


# The pipeline


@pytest.mark.few(1)
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_pipeline_equals_policy_cache_for_each_prompt(batch_size: int) -> None:
    model, tokenizer = model_and_tokenizer()
    texts = ["one and two", "nothing (comes) of nothing; and so on, and so on", "x = 7"]
    pipe = hf.pipeline(model, tokenizer, PLAN, batch_size=batch_size)
    options = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    answers = [answer[0]["generated_text"] for answer in pipe(texts, **options)]
    for text, answer in zip(texts, answers, strict=True):
        ids = tokenizer(text)["input_ids"]
        (expected,) = generated_tokens(model, [ids], 12, past_key_values=PolicyCache(model, PLAN))
        assert answer == tokenizer.decode(expected, skip_special_tokens=True)
    last = texts[-((len(texts) - 1) % batch_size + 1) :]
    assert pipe.report is not None
    assert pipe.report.tokens == tuple(len(text) + 11 for text in last)
    assert pipe.report.peak_rows <= 16


def test_pipeline_accepts_stop_strings() -> None:
    model, tokenizer = model_and_tokenizer()
    pipe = hf.pipeline(model, tokenizer, PLAN)
    options = {"max_new_tokens": 20, "do_sample": False, "return_full_text": False}
    whole = pipe("one and two", **options)[0]["generated_text"]
    stop = whole[5]
    cut = pipe("one and two", stop_sequence=stop, **options)[0]["generated_text"]
    assert cut == whole[: whole.index(stop) + 1]


def test_pipeline_needs_a_tokenizer() -> None:
    with pytest.raises(KVPolicyError, match="tokenizer"):
        hf.pipeline(shared_model(), None, Plan.uniform("full"))


def test_pipeline_refuses_an_invalid_plan() -> None:
    model, tokenizer = model_and_tokenizer()
    with pytest.raises(PlanError, match="budget"):
        hf.pipeline(model, tokenizer, Plan.uniform("rkv"))
