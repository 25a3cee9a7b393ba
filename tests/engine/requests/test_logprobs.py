"""Log-probabilities of tokens are those of a plain forward, however the tokens are made."""

from typing import Any

import pytest
import torch
from arrivals import ROUNDING, check_alike
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, prompts
from tiny import shared_model, tiny_tokenizer

from kvpolicy import Engine, Plan, Request, Result, Sampling
from kvpolicy.engine.extensions import logprobs

NUM_LAYERS = 2
MODEL = shared_model(num_layers=NUM_LAYERS, dtype=torch.float64)
FULL = Plan.uniform("full")
TIGHT = Plan.uniform("h2o", budget=12, buffer=4)
VOCAB = 61

ways = st.fixed_dictionaries(
    {
        "eager": st.booleans(),
        "steps_per_read": st.integers(1, 2),
        "slots": st.integers(1, 3),
        "chunk": st.sampled_from([2, 512]),
    }
)
samplings = st.sampled_from([Sampling(), Sampling(1.5, seed=4), Sampling(0.7, top_k=3)])


def check_against_plain_forward(prompt: list[int], result: Result, num_top: int) -> None:
    """Every position of a forward over prompt and tokens, in a loop."""
    ids = torch.tensor([[*prompt, *result.tokens]])
    with torch.no_grad():
        expected = MODEL(ids).logits[0].log_softmax(dim=-1)
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.tokens) > 0
    for index, (token, found) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
        row = expected[len(prompt) - 1 + index]
        assert found.token == token
        assert found.logprob == pytest.approx(float(row[token]), abs=ROUNDING)
        likeliest = sorted(range(VOCAB), key=lambda one: -float(row[one]))[:num_top]
        assert [one for one, _ in found.top] == likeliest
        for one, value in found.top:
            assert value == pytest.approx(float(row[one]), abs=ROUNDING)


@given(prompts(count=3), st.integers(0, 5), samplings, ways)
def test_logprobs_are_those_of_a_plain_forward(
    prompts: list[list[int]], num_top: int, sampling: Sampling, way: dict[str, Any]
) -> None:
    requests = [Request(prompt, 9, sampling, stop_ids=(3,), logprobs=num_top) for prompt in prompts]
    results = Engine(MODEL, plan=FULL, **way).generate(requests).results()
    for prompt, result in zip(prompts, results, strict=True):
        check_against_plain_forward(prompt, result, num_top)


@pytest.mark.slow
@costly
@given(prompts(count=3, min_len=20, max_len=30), ways)
def test_logprobs_under_eviction_do_not_depend_on_the_way(
    prompts: list[list[int]], way: dict[str, Any]
) -> None:
    requests = [Request(prompt, 14, logprobs=2) for prompt in prompts]
    some = Engine(MODEL, plan=TIGHT, **way).generate(requests).results()
    plain = Engine(MODEL, plan=TIGHT, slots=1, eager=True)
    for request, result in zip(requests, some, strict=True):
        (alone,) = plain.generate([request]).results()
        assert result.rows_evicted > 0
        check_alike(result.logprobs, alone.logprobs)


@costly
@given(ways)
def test_each_request_gets_what_it_asks_for(way: dict[str, Any]) -> None:
    wanted = [None, 0, 3, None, 99]
    requests = [Request([5, 6, number], 6, logprobs=num) for number, num in enumerate(wanted)]
    results = Engine(MODEL, plan=FULL, **way).generate(requests).results()
    for num, result in zip(wanted, results, strict=True):
        if num is None:
            assert result.logprobs is None
        else:
            assert result.logprobs is not None
            assert {len(one.top) for one in result.logprobs} == {min(num, VOCAB)}
            assert len(result.logprobs) == 6


@pytest.mark.parametrize("eager", [False, True])
def test_nothing_is_computed_where_nobody_asks(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        msg = "log-probabilities were computed"
        raise AssertionError(msg)

    monkeypatch.setattr(logprobs.Measured, "__init__", fail)
    engine = Engine(MODEL, plan=FULL, eager=eager)
    assert len(engine.generate([[5, 6]], max_new_tokens=4).results()[0].tokens) == 4
    with pytest.raises(AssertionError, match="were computed"):
        engine.generate([Request([5, 6], 4, logprobs=0)]).results()


def test_resumed_request_has_those_of_its_own_tokens() -> None:
    engine = Engine(MODEL, plan=TIGHT)
    (whole,) = engine.generate([Request([5] * 20, 16, logprobs=1)]).results()
    (first,) = engine.generate([Request([5] * 20, 7, logprobs=1, snapshot=True)]).results()
    (rest,) = engine.generate([Request(max_new_tokens=9, resume=first.snapshot, logprobs=1)])
    assert whole.logprobs is not None
    check_alike(first.logprobs, whole.logprobs[:7])
    check_alike(rest.logprobs, whole.logprobs[7:])


def test_request_ended_by_a_stop_string_has_one_for_each_token() -> None:
    engine = Engine(MODEL, tiny_tokenizer(), FULL, steps_per_read=2)
    (free,) = engine.generate([Request([5, 6], 12)]).results()
    assert free.text is not None
    (result,) = engine.generate([Request([5, 6], 12, stop=free.text[3:5], logprobs=0)]).results()
    assert result.finish_reason == "stop"
    check_against_plain_forward([5, 6], result, 0)


def test_logprobs_are_plain_data_in_a_record() -> None:
    (result,) = Engine(MODEL, plan=FULL).generate([Request([5], 2, logprobs=1)]).results()
    assert result.logprobs is not None
    first = result.to_dict()["logprobs"][0]
    assert first["token"] == result.tokens[0]
    assert first["top"][0][1] == result.logprobs[0].top[0][1]
