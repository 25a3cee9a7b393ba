"""Generation configs: the engine chooses the tokens that `generate` chooses, or refuses."""

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import greedy_tokens, shared_model, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import GenerationConfig

from kvpolicy import Engine, Plan, Request, Sampling
from kvpolicy.attention.draw import draw
from kvpolicy.engine.sampler import columns_of
from kvpolicy.errors import KVPolicyError, ModelError
from kvpolicy.model.generation_config import REFUSED

FULL = Plan.uniform("full")
PROMPTS = [[5, 6, 7, 8], [9], [11, 12, 5, 6, 7, 8, 5, 6], [20, 21]]
FIRST, END = 45, 55  # of the answer to the first prompt: its first token, and its fourth
FOLLOWED: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[FIRST], [12, END]],
    "suppress_tokens": [FIRST, 41],
    "begin_suppress_tokens": [FIRST],
    "sequence_bias": {(FIRST,): -20.0, (7, 33): -9.0},
    "min_length": 9,
    "min_new_tokens": 6,
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 7,
    "exponential_decay_length_penalty": [3, 1.4],
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 1,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "eos_token_id": [END, 59],
}
ENDS = {"eos_token_id": FOLLOWED["eos_token_id"]}
WAYS: dict[str, dict[str, Any]] = {
    "static": {},
    "eager": {"eager": True},
    "steps read together": {"steps_per_read": 2},
    "one slot": {"slots": 1},
    "chunks": {"chunk": 2},
}


def model_with(**config: Any) -> Any:
    """A model with a generation config of its own, and shared weights."""
    model = copy.copy(shared_model(seed=1))
    model.generation_config = GenerationConfig(**config)
    return model


def expected(model: Any, prompts: list[list[int]] = PROMPTS, most: int = 12) -> list[list[int]]:
    """The tokens of `generate` for each prompt alone."""
    return [greedy_tokens(model, prompt, most) for prompt in prompts]


def tokens(model: Any, prompts: Any = PROMPTS, most: int = 12, **options: Any) -> list[list[int]]:
    """The tokens of an engine, which serves the prompts together."""
    results = Engine(model, None, FULL, **options).generate(prompts, max_new_tokens=most).results()
    assert [result.error for result in results] == [None] * len(results)
    return [list(result.tokens) for result in results]


@cache
def _unchanged() -> list[list[int]]:
    return expected(model_with(**ENDS), PROMPTS[:3])


@pytest.mark.parametrize("field", FOLLOWED)
def test_every_sequence_of_a_batch_gets_the_tokens_that_generate_gives_it_alone(field: str) -> None:
    model = model_with(**ENDS | {field: FOLLOWED[field]})
    wanted = expected(model, PROMPTS[:3])
    assert tokens(model, PROMPTS[:3], slots=2) == wanted
    neutral = {"remove_invalid_values", "renormalize_logits", "eos_token_id"}
    if field not in neutral:
        assert wanted != _unchanged(), "the field changes something"


@pytest.mark.few(3)
@pytest.mark.parametrize("way", WAYS)
def test_all_at_once_equals_generate_on_every_path(way: str) -> None:
    model = model_with(
        repetition_penalty=1.2,
        no_repeat_ngram_size=3,
        min_new_tokens=6,
        eos_token_id=[END, 59],
        suppress_tokens=[3],
        forced_eos_token_id=7,
    )
    assert tokens(model, **WAYS[way]) == expected(model)


def test_a_request_replaces_what_the_model_says() -> None:
    model = model_with(repetition_penalty=1.3, min_new_tokens=5, eos_token_id=END)
    asked = [
        (Request(PROMPTS[0], 12), {}),
        (Request(PROMPTS[0], 12, min_new_tokens=0), {"min_new_tokens": 0}),
        (Request(PROMPTS[0], 12, Sampling(repetition_penalty=1)), {"repetition_penalty": 1.0}),
        (
            Request(PROMPTS[0], 12, Sampling(repetition_penalty=2), min_new_tokens=9),
            {"repetition_penalty": 2.0, "min_new_tokens": 6},
        ),
        (Request(PROMPTS[0], 12, stop_ids=()), {"eos_token_id": None}),
    ]
    wanted = []
    for _, changes in asked:
        other = model_with(repetition_penalty=1.3, min_new_tokens=5, eos_token_id=END)
        other.generation_config.update(**changes)
        wanted += expected(other, PROMPTS[:1], 12)
    assert len({*map(tuple, wanted)}) > 2
    assert tokens(model, [request for request, _ in asked]) == wanted


def test_sequences_with_processors_leave_the_others_as_they_are() -> None:
    model = model_with()
    penalty = Sampling(repetition_penalty=1.4)
    drawn = Sampling(temperature=1.3, seed=5)
    requests = [Request(PROMPTS[0], 15), Request(PROMPTS[2], 15, penalty), Request([9], 9, drawn)]
    alone = [tokens(model, [request])[0] for request in requests]
    assert tokens(model, requests, steps_per_read=2) == alone
    assert alone[:1] == expected(model, PROMPTS[:1], 15)


def test_a_sequence_that_is_resumed_has_the_processors_of_the_whole() -> None:
    model = model_with(
        repetition_penalty=1.3, begin_suppress_tokens=[FIRST], no_repeat_ngram_size=2
    )
    (whole,) = expected(model, PROMPTS[:1], 20)
    engine = Engine(model, None, FULL)
    (first,) = engine.generate([Request(PROMPTS[0], 8, snapshot=True)])
    (rest,) = engine.generate([Request(resume=first.snapshot, max_new_tokens=12)])
    assert [*first.tokens, *rest.tokens] == whole
    (turn,) = engine.generate([Request([5, 6], 8, resume=first.snapshot)])
    assert [list(turn.tokens)] == expected(model, [[*PROMPTS[0], *first.tokens, 5, 6]], 8)


def test_stop_strings_of_the_model_end_requests_that_name_none() -> None:
    tokenizer = tiny_tokenizer()
    (plain,) = expected(model_with(), PROMPTS[:1], 12)
    stop = tokenizer.decode(plain[4:6])
    model = model_with(stop_strings=stop)
    engine = Engine(model, tokenizer, FULL)
    own, other = engine.generate(
        [Request(PROMPTS[0], 12), Request(PROMPTS[0], 12, stop=tokenizer.decode(plain[8:9]))]
    ).results()
    assert own.finish_reason == "stop"
    assert list(own.tokens) == plain[: len(own.tokens)]
    assert stop in tokenizer.decode(own.tokens)
    assert len(own.tokens) != len(other.tokens)
    stream = engine.stream(PROMPTS[0], max_new_tokens=12)
    assert "".join(stream) == stream.result.text == own.text


def scores_of(model: Any, prompt: list[int], **how: Any) -> Tensor:
    """The scores from which `generate` draws the first token, ``[1, V]``."""
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=1,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **how,
    )
    return answer.scores[0]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "cut",
    [
        {"typical_p": 0.4},
        {"epsilon_cutoff": 0.05},
        {"eta_cutoff": 0.05},
        {"top_h": 0.5},
        {"typical_p": 0.5, "repetition_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_what_generate_draws_from(cut: dict[str, Any]) -> None:
    model = model_with(**cut)
    how = {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.02}
    scores = scores_of(model, PROMPTS[0], **how)
    allowed = scores.isfinite()[0]
    assert 1 < int(allowed.sum()) < 30
    samplings = [Sampling(**how, seed=seed) for seed in range(40)]
    found = torch.tensor(tokens(model, [Request(PROMPTS[0], 1, one) for one in samplings]))[:, 0]
    assert bool(allowed[found].all())
    columns = columns_of([Sampling(1.0, seed=seed) for seed in range(40)], "cpu")
    wanted = draw(scores.expand(40, -1), columns, torch.full((40,), len(PROMPTS[0])))
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(field: str) -> None:
    model = model_with()
    given = {"num_beams": 3, "guidance_scale": 1.5, "num_beam_groups": 2, "penalty_alpha": 0.6}
    setattr(model.generation_config, field, given.get(field, "anything"))
    with pytest.raises(ModelError, match=field):
        Engine(model, None, FULL)
    for off in (None, *REFUSED[field]):
        setattr(model.generation_config, field, off)
        Engine(model, None, FULL)


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", -1.0), ("suppress_tokens", "abc"), ("bad_words_ids", [[1, -5]])],
)
def test_values_that_generate_does_not_take_are_refused_when_the_engine_is_made(
    field: str, value: Any
) -> None:
    model = model_with()
    setattr(model.generation_config, field, value)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        Engine(model, None, FULL)


def test_a_config_that_rules_out_every_token_ends_the_request_with_an_error() -> None:
    model = tiny_model()
    model.generation_config.suppress_tokens = list(range(61))
    (result,) = Engine(model, None, FULL).generate([[5, 6]])
    assert result.finish_reason == "error"
    assert "suppress_tokens" in str(result.error)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.5},
        {"min_p": -0.1},
        {"min_p": True},
        {"repetition_penalty": 0},
        {"repetition_penalty": "big"},
        {"repetition_penalty": float("nan")},
    ],
    ids=str,
)
def test_invalid_samplings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(KVPolicyError, match=next(iter(wrong))):
        Sampling(**wrong)


def table() -> dict[str, str]:
    """What becomes of each field, by the page."""
    page = Path(__file__).parents[3] / "docs/reference/generation-config.md"
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    found = [(name, answer) for names, answer in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(found) == len(dict(found)), "no field stands twice"
    return dict(found)


def test_the_page_says_what_becomes_of_every_field() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - table().keys() == set()


def test_the_page_says_what_is_followed_and_what_is_refused() -> None:
    kinds = {
        kind: {name for name, answer in table().items() if answer.startswith(kind)}
        for kind in ("followed", "refused", "the request", "no effect")
    }
    assert set.union(*kinds.values()) == table().keys()
    assert kinds["refused"] == set(REFUSED)
    cuts = {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    assert kinds["followed"] == {*FOLLOWED, *cuts, "stop_strings"}


WITHOUT_EFFECT = {
    "max_time": 0.0,
    "num_return_sequences": 3,
    "max_length": 2,
    "pad_token_id": FIRST,
    "use_cache": False,
    "cache_implementation": "static",
    "prompt_lookup_num_tokens": 2,
    "length_penalty": 5.0,
    "temperature": 0.1,
    "top_k": 1,
    "do_sample": True,
    "typical_p": 0.1,
}


@cache
def _plain() -> list[list[int]]:
    return tokens(model_with())


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_the_other_fields_change_no_greedy_tokens(field: str) -> None:
    model = model_with()
    setattr(model.generation_config, field, WITHOUT_EFFECT[field])
    assert tokens(model) == _plain()
