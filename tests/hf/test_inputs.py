"""A `PolicyCache` continues its conversation and refuses other inputs."""

from typing import Any

import pytest
import torch
from batches import PAD, generated_tokens, padded
from hypothesis import given
from hypothesis import strategies as st
from strategies import SMALL_KNOBS, costly, prompts, seeds
from tiny import FAMILIES, shared_model
from torch import Tensor, nn

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.compat import cache_argument
from kvpolicy.errors import CacheError

NUM_LAYERS = 2
FIRST, SECOND = 6, 8  # tokens generated in each turn
OPTIONS = {"do_sample": False, "pad_token_id": PAD}

models = st.builds(
    shared_model,
    st.sampled_from(FAMILIES),
    seed=st.integers(0, 3),
    num_layers=st.just(NUM_LAYERS),
    dtype=st.just(torch.float64),
)
questions = prompts(count=1, min_len=1, max_len=30)


@st.composite
def plans_by_fill(draw: st.DrawFn) -> Plan:
    """Plans that compact a sequence only when its buffer is full.

    Compaction then happens after the same tokens, wherever the prompt ends.
    """
    name = draw(st.sampled_from(["streaming", "rkv", "h2o", "snapkv", "skipkv"]))
    knobs = [
        one for one in SMALL_KNOBS[name] if "every" not in one and one.get("phase") != "prefill"
    ]
    return Plan.uniform(
        name,
        budget=draw(st.integers(12, 20)),
        buffer=draw(st.integers(1, 8)),
        knobs={name: draw(st.sampled_from(knobs))},
    )


def engine_tokens(model: nn.Module, prompt: list[int], plan: Plan, num: int) -> list[int]:
    (result,) = Engine(model, plan=plan).generate([prompt], max_new_tokens=num).results()
    return list(result.tokens)


def two_turns(
    model: Any, cache: PolicyCache | None, prompt: list[int], more: list[int], **second: Any
) -> tuple[list[int], list[int]]:
    """The whole prompt of the second turn, and the answer to it."""
    (first,) = generated_tokens(model, [prompt], FIRST, past_key_values=cache)
    text = [*prompt, *first, *more]
    (answer,) = generated_tokens(model, [text], SECOND, past_key_values=cache, **second)
    return text, answer


@costly
@given(models, questions, questions, plans_by_fill())
def test_second_turn_equals_the_engine_on_the_whole_text(
    model: nn.Module, question: list[list[int]], more: list[list[int]], plan: Plan
) -> None:
    cache = PolicyCache(model, plan)
    text, answer = two_turns(model, cache, question[0], more[0])
    assert answer == engine_tokens(model, text, plan, SECOND)
    assert cache.report.tokens == (len(text) + SECOND - 1,)


@costly
@given(models, questions, questions)
def test_second_turn_equals_generate_without_eviction(
    model: nn.Module, question: list[list[int]], more: list[list[int]]
) -> None:
    cache = PolicyCache(model, Plan.uniform("full"))
    text, answer = two_turns(model, cache, question[0], more[0])
    assert answer == generated_tokens(model, [text], SECOND)[0]


@costly
@given(models, prompts(count=3, max_len=30), prompts(count=3, max_len=9), plans_by_fill())
def test_second_turn_of_a_padded_batch_equals_the_engine(
    model: nn.Module, questions: list[list[int]], more: list[list[int]], plan: Plan
) -> None:
    """The second questions differ in length, so there are pads in the middle."""
    cache = PolicyCache(model, plan)
    first, second = padded(questions), padded(more)
    options = {**cache_argument(cache), **OPTIONS}
    ids = model.generate(**first, max_new_tokens=FIRST, **options)
    ones = torch.ones(3, FIRST, dtype=torch.int64)
    both = torch.cat([ids, second["input_ids"]], dim=1)
    mask = torch.cat([first["attention_mask"], ones, second["attention_mask"]], dim=1)
    answers = model.generate(both, attention_mask=mask, max_new_tokens=SECOND, **options)
    for row in range(3):
        text = both[row][mask[row] == 1].tolist()
        expected = engine_tokens(model, text, plan, SECOND)
        assert answers[row, both.shape[1] :].tolist() == expected


@given(models, questions, plans_by_fill(), st.integers(1, 8))
def test_two_calls_equal_one_long_call(
    model: nn.Module, question: list[list[int]], plan: Plan, cut: int
) -> None:
    cache, prompt = PolicyCache(model, plan), question[0]
    (first,) = generated_tokens(model, [prompt], cut, past_key_values=cache)
    (rest,) = generated_tokens(model, [[*prompt, *first]], SECOND, past_key_values=cache)
    assert [*first, *rest] == engine_tokens(model, prompt, plan, cut + SECOND)


@costly
@given(models, questions, questions, plans_by_fill(), seeds)
def test_reset_cache_equals_a_new_cache(
    model: nn.Module, question: list[list[int]], other: list[list[int]], plan: Plan, seed: int
) -> None:
    cache = PolicyCache(model, plan)
    two_turns(model, cache, question[0], [seed % 61])
    cache.reset()
    assert cache.get_seq_length() == 0
    (answer,) = generated_tokens(model, other, SECOND, past_key_values=cache)
    assert answer == engine_tokens(model, other[0], plan, SECOND)
    fresh = PolicyCache(model, plan)
    generated_tokens(model, other, SECOND, past_key_values=fresh)
    reported, expected = cache.report.to_dict(), fresh.report.to_dict()
    assert reported | {"policy_s": 0} == expected | {"policy_s": 0}


def test_turns_may_differ_in_inference_mode() -> None:
    """Tensors of the cache and of policies are usable in and outside inference mode."""
    model = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)
    plan = Plan.uniform("h2o", "rkv", budget=16, buffer=3, knobs={"rkv": {"window_size": 4}})
    cache = PolicyCache(model, plan)
    with torch.inference_mode():
        (first,) = generated_tokens(model, [[1, 2, 3] * 9], FIRST, past_key_values=cache)
    text = [*[1, 2, 3] * 9, *first, 8, 9]
    (answer,) = generated_tokens(model, [text], SECOND, past_key_values=cache)
    assert answer == engine_tokens(model, text, plan, SECOND)


# Invalid continuations


def started_cache(num_rows: int = 1) -> tuple[Any, PolicyCache, Tensor]:
    """A model, a cache that has seen 12 columns, and their token ids."""
    model = shared_model(num_layers=NUM_LAYERS)
    cache = PolicyCache(model, Plan.uniform("full"))
    ids = torch.arange(1, 1 + 8 * num_rows).view(num_rows, 8)
    mask = torch.ones_like(ids)
    mask[0, : num_rows - 1] = 0
    seen = model.generate(
        ids, attention_mask=mask, **cache_argument(cache), max_new_tokens=5, **OPTIONS
    )
    assert cache.get_seq_length() == 12
    return model, cache, seen


def continue_with(model: Any, cache: PolicyCache, ids: Tensor, mask: Tensor | None = None) -> None:
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        new = ids[:, cache.get_seq_length() :]
        model(new, attention_mask=mask, past_key_values=cache)


def test_changed_batch_size_raises() -> None:
    model, cache, seen = started_cache()
    with pytest.raises(CacheError, match="batch of 2"):
        continue_with(model, cache, torch.cat([seen, seen]))


def test_changed_pads_raise() -> None:
    model, cache, seen = started_cache(2)
    longer = torch.cat([seen, seen[:, :3]], dim=1)
    with pytest.raises(CacheError, match="column 0 of row 0"):
        continue_with(model, cache, longer)
    mask = torch.ones_like(longer)
    mask[0, 0] = 0
    mask[1, 5] = 0
    with pytest.raises(CacheError, match="column 5 of row 1"):
        continue_with(model, cache, longer, mask)
    mask[1, 5] = 1
    continue_with(model, cache, longer, mask)  # the cache is unchanged by the failed calls
    assert cache.report.tokens == (15, 16)


def test_mask_of_wrong_length_raises() -> None:
    model, cache, seen = started_cache()
    with pytest.raises(CacheError, match=r"\[1, 13\].*\[1, 14\]"):
        continue_with(model, cache, torch.cat([seen, seen[:, :1]], dim=1), torch.ones(1, 13))


def test_wrong_positions_raise() -> None:
    model, cache, seen = started_cache()
    with (
        pytest.raises(CacheError, match="position 0 of row 0"),
        torch.no_grad(),
    ):
        model(
            seen[:, :4],
            position_ids=torch.arange(4)[None],
            past_key_values=cache,
        )


def test_shorter_prompt_raises_in_generate() -> None:
    model, cache, seen = started_cache()
    # Older releases of transformers raise an IndexError themselves.
    with pytest.raises((CacheError, IndexError)):
        model.generate(seen[:, :5] + 1, **cache_argument(cache), max_new_tokens=3, **OPTIONS)


def test_prompt_with_other_tokens_raises() -> None:
    _, cache, seen = started_cache()
    more = torch.cat([seen, seen[:, :3]], dim=1)
    cache.check_prompt(more)
    with pytest.raises(CacheError, match="12 tokens in row 0"):
        cache.check_prompt(more + 1)
    with pytest.raises(CacheError, match="begin"):
        cache.check_prompt(seen[:, :12])
    with pytest.raises(CacheError, match="mask"):
        cache.check_prompt(more[:, 12:], torch.ones_like(more))
    cache.reset()
    cache.check_prompt(more + 1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[1, 61]]), "token id 61; expected 0 to 60"),
        (torch.tensor([[1, -1]]), "token id -1; expected 0 to 60"),
        (torch.tensor([[1.0, 2.5]]), "holds 1.0; expected text or integer token ids"),
    ],
)
def test_tokens_outside_the_vocabulary_raise(tokens: Tensor, message: str) -> None:
    model = shared_model()
    cache = PolicyCache(model, Plan.uniform("full"))
    with pytest.raises(CacheError, match=message), torch.no_grad():
        model(input_ids=tokens, past_key_values=cache)
    assert generated_tokens(model, [[1, 2]], 3, past_key_values=cache)


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_ids": [[1, 2]]},
        {"input_ids": torch.ones(2, dtype=torch.int64)},
        {"input_ids": torch.ones(1, 1, 2, dtype=torch.int64)},
        {"input_ids": torch.ones(1, 2, dtype=torch.int64, device="meta")},
        {"attention_mask": [[1, 1]]},
        {"position_ids": "first"},
    ],
)
def test_arguments_that_are_no_such_tensors_raise(wrong: dict[str, Any]) -> None:
    model = shared_model()
    cache = PolicyCache(model, Plan.uniform("full"))
    given = {"input_ids": torch.tensor([[1, 2]]), "past_key_values": cache} | wrong
    with pytest.raises(CacheError, match=next(iter(wrong))):
        torch.no_grad()(model)(**given)


def test_right_padding_raises() -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    ids, mask = torch.tensor([[4, 5, 6], [7, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    cache = PolicyCache(model, Plan.uniform("full"))
    with pytest.raises(CacheError, match="row 1"):
        model.generate(
            ids, attention_mask=mask, **cache_argument(cache), max_new_tokens=2, **OPTIONS
        )


def test_row_without_a_token_raises() -> None:
    model = shared_model(num_layers=NUM_LAYERS)
    inputs = padded([[1, 2, 3, 4, 5, 6], [7, 8]])
    cache = PolicyCache(model, Plan.uniform("full"))
    with pytest.raises(CacheError, match=r"row 1.*prefill_chunk_size"):
        model.generate(
            **inputs, **cache_argument(cache), prefill_chunk_size=3, max_new_tokens=2, **OPTIONS
        )
