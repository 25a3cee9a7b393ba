"""A bias of tokens, and penalties on the answer's own: in every way as a loop over logits."""

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from tiny import shared_model

from kvpolicy import Engine, Plan, Request, Sampling
from kvpolicy.errors import KVPolicyError

FULL = Plan.uniform("full")
PROMPTS = [[5, 6, 7, 8], [9], [11, 12, 5, 6, 7, 8, 5, 6]]
NEW = 14
SAMPLINGS = {
    "frequency": Sampling(frequency_penalty=6.0),
    "presence": Sampling(presence_penalty=9.0),
    "likelier": Sampling(frequency_penalty=-9.0),
    "bias": Sampling(logit_bias={3: 7.5, 45: -100}),
    "all": Sampling(
        frequency_penalty=2.0, presence_penalty=3.0, logit_bias={7: 4}, repetition_penalty=1.2
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "static": {},
    "eager": {"eager": True},
    "steps read together": {"steps_per_read": 2},
    "one slot": {"slots": 1},
}


def expected(prompt: list[int], how: Sampling) -> list[int]:
    """Greedy tokens of a loop, each from a forward over all tokens before it."""
    return _looped(tuple(prompt), how)


@cache
@torch.no_grad()
def _looped(prompt: tuple[int, ...], how: Sampling) -> list[int]:
    answer: list[int] = []
    while len(answer) < NEW:
        logits = shared_model()(torch.tensor([[*prompt, *answer]])).logits[0, -1].tolist()
        for token, value in how.logit_bias:
            logits[token] += value
        for token, count in Counter(answer).items():
            logits[token] -= how.frequency_penalty * count + how.presence_penalty
        for token in {*prompt, *answer}:
            factor = how.repetition_penalty or 1
            logits[token] *= factor if logits[token] < 0 else 1 / factor
        answer.append(max(range(len(logits)), key=logits.__getitem__))
    return answer


@pytest.mark.few(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_a_loop_over_logits(name: str, way: str) -> None:
    how = SAMPLINGS[name]
    engine = Engine(shared_model(), plan=FULL, **WAYS[way])
    # Another sequence beside them has no penalty.
    requests = [Request(prompt, NEW, how) for prompt in PROMPTS] + [Request(PROMPTS[0], NEW)]
    *found, plain = engine.generate(requests).results()
    assert [list(one.tokens) for one in found] == [expected(prompt, how) for prompt in PROMPTS]
    assert list(plain.tokens) == expected(PROMPTS[0], Sampling())
    assert any(
        list(one.tokens) != expected(p, Sampling()) for one, p in zip(found, PROMPTS, strict=True)
    )


def test_an_answer_that_goes_on_counts_its_first_part_and_a_turn_after_it_does_not() -> None:
    how, prompt = SAMPLINGS["all"], PROMPTS[0]
    engine = Engine(shared_model(), plan=FULL)
    (part,) = engine.generate([Request(prompt, 5, how, snapshot=True)]).results()
    rest = Request((), NEW - 5, how, resume=part.snapshot)
    (whole,) = engine.generate([rest]).results()
    assert [*part.tokens, *whole.tokens] == expected(prompt, how)
    own = [9, 4]
    (turn,) = engine.generate([Request(own, NEW, how, resume=part.snapshot)]).results()
    assert list(turn.tokens) == expected([*prompt, *part.tokens, *own], how)


@pytest.mark.parametrize(
    "wrong",
    [
        {"frequency_penalty": float("nan")},
        {"presence_penalty": "1"},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": {3: float("inf")}},
        {"logit_bias": 3},
    ],
    ids=str,
)
def test_values_that_are_no_numbers_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(KVPolicyError, match=name):
        Sampling(**wrong)


def test_a_bias_of_a_token_that_the_model_does_not_have_is_refused() -> None:
    engine = Engine(shared_model(), plan=FULL)
    request = Request([5], 2, Sampling(logit_bias={61: 1}))
    (result,) = engine.generate([request]).results()
    assert result.error is not None
    assert "logit_bias" in result.error
    assert Sampling(logit_bias={7: 1, 3: 2}) == Sampling(logit_bias=[(3, 2.0), (7, 1.0)])
