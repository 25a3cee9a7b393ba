"""Log-probabilities of prompts are those of a plain forward, or are refused."""

from typing import Any

import pytest
import torch
from arrivals import ROUNDING
from hypothesis import given
from hypothesis import strategies as st
from strategies import prompts
from tiny import shared_model

from kvpolicy import Engine, Plan, Request
from kvpolicy.engine.extensions import logprobs
from kvpolicy.engine.requests.results import TokenLogprobs
from kvpolicy.engine.reuse.store import PrefixStore

MODEL = shared_model(num_layers=2, dtype=torch.float64)
FULL = Plan.uniform("full")
VOCAB = 61

ways = st.fixed_dictionaries(
    {"eager": st.booleans(), "slots": st.integers(1, 3), "chunk": st.sampled_from([2, 3, 512])}
)


def check(prompt: list[int], found: tuple[TokenLogprobs, ...] | None, num_top: int) -> None:
    with torch.no_grad():
        expected = MODEL(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    assert found is not None
    assert [one.token for one in found] == prompt[1:]
    for place, one in enumerate(found):
        row = expected[place]
        assert one.logprob == pytest.approx(float(row[one.token]), abs=ROUNDING)
        assert [token for token, _ in one.top] == row.topk(num_top).indices.tolist()


@given(prompts(count=4), st.integers(0, 3), ways, st.sampled_from([61, 200, 2**26]))
def test_they_are_those_of_a_plain_forward(
    prompts: list[list[int]], num_top: int, way: dict[str, Any], most_logits: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "_MOST_LOGITS", most_logits)
        wanted = [num_top, None, num_top, num_top]
        requests = [
            Request(prompt, 3, prompt_logprobs=num)
            for prompt, num in zip(prompts, wanted, strict=True)
        ]
        results = Engine(MODEL, plan=FULL, **way).generate(requests).results()
    plain = Engine(MODEL, plan=FULL).generate(prompts, max_new_tokens=3).results()
    for prompt, num, result, other in zip(prompts, wanted, results, plain, strict=True):
        assert result.tokens == other.tokens
        if num is None:
            assert result.prompt_logprobs is None
        else:
            check(prompt, result.prompt_logprobs, num)


def test_what_is_reused_is_computed_for_them() -> None:
    engine = Engine(MODEL, plan=FULL, prefix_store=PrefixStore(1 << 22, block_tokens=4))
    prompt = [*range(5, 25)]
    engine.generate([Request(prompt, 3)]).results()
    plain, measured = engine.generate(
        [Request(prompt, 3), Request(prompt, 3, prompt_logprobs=1)]
    ).results()
    assert plain.reused_tokens > 0
    assert measured.reused_tokens == 0
    assert measured.tokens == plain.tokens
    check(prompt, measured.prompt_logprobs, 1)


def test_a_plan_that_would_evict_as_many_rows_refuses() -> None:
    engine = Engine(MODEL, plan=Plan.uniform("h2o", budget=8, buffer=4))
    short, long = (Request([*range(5, 5 + size)], 3, prompt_logprobs=0) for size in (8, 9))
    kept, refused = engine.generate([short, long]).results()
    check([*range(5, 13)], kept.prompt_logprobs, 0)
    assert refused.finish_reason == "error"
    assert "lm-eval" in (refused.error or "")


def test_a_turn_after_a_snapshot_has_none() -> None:
    engine = Engine(MODEL, plan=FULL)
    (first,) = engine.generate([Request([5, 6], 3, snapshot=True)]).results()
    turn = Request([7, 8], 3, resume=first.snapshot, prompt_logprobs=0)
    (result,) = engine.generate([turn]).results()
    assert result.finish_reason == "error"
    assert "prompt_logprobs" in (result.error or "")
