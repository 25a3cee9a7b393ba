"""Completions through the `openai` package: the answers are those of the engine alone."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from serving import Running, break_next_step, plans_of, serving
from tiny import byte_tokenizer, tiny_model, tiny_tokenizer
from tokenizer_kinds import KINDS

from kvpolicy import Engine
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.engine.requests.results import Result
from kvpolicy.hooks import discovery

PROMPTS = ["the cat sat", "a", "on the mat, where it had been for a while. and then?", "0123456789"]
IDS = [5, 9, 40, 2, 2, 7, 11]
POLICIES = {"tiny": "full", "tiny:full": "full", "tiny:h2o": "h2o"}
WITH_IDS = {"kvpolicy": {"token_ids": True}}


def alone(server: Running, model: str, request: Request) -> Result:
    """The result of the engine alone, without a server."""
    plan = next(plan for plan in server.model.plans if plan.name == POLICIES[model])
    engine = Engine(plan.engine.adapter.model, server.model.tokenizer, plan.engine.plan, slots=1)
    (result,) = engine.generate([request]).results()
    assert result.error is None
    return result


def cost(result: Result) -> dict[str, int]:
    names = ("peak_rows", "rows_evicted", "compactions", "peak_bytes", "full_bytes")
    return {name: getattr(result, name) for name in names}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("model", POLICIES)
@pytest.mark.parametrize("prompt", [PROMPTS[2], IDS], ids=str)
def test_a_completion_equals_the_engine_alone(server: Running, model: str, prompt: Any) -> None:
    expected = alone(server, model, Request(prompt, 40))
    found = server.client().completions.create(
        model=model, prompt=prompt, max_tokens=40, temperature=0, extra_body=WITH_IDS
    )
    (choice,) = found.choices
    assert choice.text == expected.text
    assert choice.model_extra["token_ids"] == list(expected.tokens)
    assert choice.finish_reason == "length"
    assert found.model == model
    assert found.object == "text_completion"
    usage = found.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_len, 40)
    assert usage.total_tokens == expected.prompt_len + 40
    assert usage.model_extra["kvpolicy"] == cost(expected)
    assert (expected.rows_evicted > 0) == (model == "tiny:h2o")


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["tiny", "tiny:h2o"])
def test_a_stream_has_the_pieces_of_the_completion(server: Running, model: str) -> None:
    expected = alone(server, model, Request(PROMPTS[0], 40))
    chunks = list(
        server.client().completions.create(
            model=model,
            prompt=PROMPTS[0],
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=WITH_IDS,
        )
    )
    *pieces, last, usage = chunks
    assert "".join(piece.choices[0].text for piece in pieces) == expected.text
    ids = [token for piece in pieces for token in piece.choices[0].model_extra["token_ids"]]
    assert ids == list(expected.tokens)
    assert {piece.choices[0].finish_reason for piece in pieces} == {None}
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "length")
    assert usage.choices == []
    assert usage.usage.model_extra["kvpolicy"] == cost(expected)
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(pieces) > 5, "it came in pieces"


def test_a_stream_ends_with_done_and_has_usage_only_if_asked(server: Running) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True}
    with server.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, end = [event for event in answer.text.split("\n\n") if event]
    assert end == "data: [DONE]"
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events)


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_have_seeds_that_follow_each_other(server: Running, stream: bool) -> None:
    samplings = [Sampling(temperature=1.5, top_p=0.9, seed=seed) for seed in (7, 8, 9)]
    prompts = ["the cat", [3, 1, 2]]
    expected = [
        alone(server, "tiny:h2o", Request(prompt, 12, sampling)).text
        for prompt in prompts
        for sampling in samplings
    ]
    assert len(set(expected)) == 6
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "seed": 7, "n": 3}
    texts = dict.fromkeys(range(6), "")
    # One prompt is text and one token ids, which the client's types do not have.
    found = server.client().completions.create(
        model="tiny:h2o", prompt=prompts, max_tokens=12, stream=stream, **options
    )
    for answer in found if stream else [found]:
        for choice in answer.choices:
            texts[choice.index] += choice.text
    assert [texts[index] for index in range(6)] == expected
    if not stream:
        assert found.usage.prompt_tokens == len("the cat") + 3
        assert found.usage.completion_tokens == 72


def test_a_request_without_a_seed_draws_another_one(server: Running) -> None:
    client = server.client()
    texts = {
        client.completions.create(model="tiny", prompt="a", max_tokens=16).choices[0].text
        for _ in range(2)
    }
    assert len(texts) == 2, "the default temperature is 1"


def test_an_echo_has_the_prompt_and_its_logprobs(server: Running) -> None:
    """As lm-evaluation-harness scores continuations, by the log-probabilities of their tokens."""
    contexts, ends = [[5, 9, 40], [7]], [[2, 2, 7], [11, 4]]
    prompts = [[*context, *end] for context, end in zip(contexts, ends, strict=True)]
    body = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    found = server.client().completions.create(prompt=prompts, **body)
    model, tokenizer = server.plan.engine.adapter.model, server.model.tokenizer
    for choice, prompt, end in zip(found.choices, prompts, ends, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = model(ids).logits[0].log_softmax(dim=-1)
        likeliest = expected.argmax(dim=-1).tolist()
        measured = choice.logprobs
        assert measured is not None
        scores = measured.token_logprobs[len(prompt) - len(end) : -1]
        places = range(len(prompt) - len(end), len(prompt))
        assert scores == pytest.approx([float(expected[p - 1, prompt[p]]) for p in places])
        tops = measured.top_logprobs[len(prompt) - len(end) : -1]
        is_greedy = [max(top.values()) == score for top, score in zip(tops, scores, strict=True)]
        assert is_greedy == [likeliest[p - 1] == prompt[p] for p in places]
        assert measured.token_logprobs[0] is measured.top_logprobs[0] is None
        texts = measured.tokens
        assert texts == [tokenizer.decode([one]) for one in [*prompt, likeliest[-1]]]
        assert choice.text == "".join(texts)
        assert measured.text_offset == [len("".join(texts[:n])) for n in range(len(texts))]


def test_an_echo_needs_no_logprobs_and_goes_with_choices(server: Running) -> None:
    create = server.client().completions.create
    options = {"model": "tiny", "prompt": PROMPTS[:2], "n": 2, "seed": 3, "max_tokens": 9}
    plain, echoed = create(**options), create(**options, echo=True)
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    for prompt, one, other in zip(prompts, plain.choices, echoed.choices, strict=True):
        assert other.text == prompt + one.text
        assert other.logprobs is None


UNECHOED = [{"stream": True}, {"model": "tiny:h2o", "prompt": PROMPTS[2], "logprobs": 0}]


@pytest.mark.parametrize("change", UNECHOED, ids=str)
def test_an_echo_that_cannot_be_right_is_refused(server: Running, change: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "echo": True, **change}
    with pytest.raises(openai.BadRequestError):
        server.client().completions.create(**body)


def test_an_echo_is_one_text_with_its_answer() -> None:
    tokenizer = KINDS["Llama"]()
    model = tiny_model(num_layers=1, vocab=len(tokenizer))
    with serving(plans_of(full=0), model=model, tokenizer=tokenizer) as running:
        found = running.client().completions.create(
            model="tiny",
            prompt=["one", "the 한국"],
            max_tokens=12,
            n=4,
            temperature=2,
            seed=1,
            echo=True,
            logprobs=0,
            extra_body=WITH_IDS,
        )
    for choice in found.choices:
        prompt = tokenizer("one" if choice.index < 4 else "the 한국")["input_ids"]
        ids = [*prompt, *choice.model_extra["token_ids"]]
        assert choice.text == tokenizer.decode(ids, skip_special_tokens=True)
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens) == len(ids)


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(server: Running, stream: bool) -> None:
    whole = alone(server, "tiny", Request(PROMPTS[1], 60)).text
    assert whole is not None
    stop = whole[20:23]
    expected = alone(server, "tiny", Request(PROMPTS[1], 60, stop=(stop,)))
    found = server.client().completions.create(
        model="tiny", prompt=PROMPTS[1], max_tokens=60, temperature=0, stop=stop, stream=stream
    )
    answers = list(found) if stream else [found]
    assert "".join(a.choices[0].text for a in answers) == expected.text
    assert answers[-1].choices[0].finish_reason == "stop"
    assert whole.startswith(expected.text or "?")
    assert stop not in (expected.text or "")
    found = server.client().completions.create(
        model="tiny",
        prompt=PROMPTS[1],
        max_tokens=60,
        temperature=0,
        stop=stop,
        stream=stream,
        extra_body={"include_stop_str_in_output": True},
    )
    answers = list(found) if stream else [found]
    assert "".join(a.choices[0].text for a in answers) == f"{expected.text}{stop}"


def test_stop_ids_of_a_request_end_it(server: Running) -> None:
    tokens = alone(server, "tiny", Request(IDS, 60)).tokens
    end = next(token for token in tokens[10:] if token not in tokens[:10])
    found = server.client().completions.create(
        model="tiny",
        prompt=IDS,
        max_tokens=60,
        temperature=0,
        extra_body={"kvpolicy": {"stop_ids": [end], "token_ids": True}},
    )
    assert found.choices[0].model_extra["token_ids"] == list(tokens[: tokens.index(end) + 1])
    assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_engine(server: Running, stream: bool) -> None:
    expected = alone(server, "tiny", Request("the cat", 8, logprobs=3)).logprobs
    assert expected is not None
    found = server.client().completions.create(
        model="tiny", prompt="the cat", max_tokens=8, temperature=0, logprobs=3, stream=stream
    )
    answers = list(found) if stream else [found]
    logprobs = [a.choices[0].logprobs for a in answers if a.choices[0].logprobs]
    assert [one for part in logprobs for one in part.token_logprobs] == pytest.approx(
        [one.logprob for one in expected]
    )
    decode = server.model.tokenizer.decode
    tokens = [one for part in logprobs for one in part.tokens]
    assert tokens == [decode([one.token]) for one in expected]
    top = [one for part in logprobs for one in part.top_logprobs]
    assert [[*one] for one in top] == [[decode([t]) for t, _ in one.top] for one in expected]
    offsets = [one for part in logprobs for one in part.text_offset]
    assert offsets == [sum(map(len, tokens[:i])) for i in range(8)]


def test_without_max_tokens_a_completion_has_openais_sixteen(server: Running) -> None:
    found = server.client().completions.create(model="tiny", prompt="a")
    assert found.usage is not None
    assert found.usage.completion_tokens == 16
    almost = server.client().completions.create(model="tiny", prompt="a" * 505)
    assert almost.usage is not None
    assert almost.usage.total_tokens == 512, "or what is left"


def test_concurrent_requests_do_not_depend_on_each_other(server: Running) -> None:
    jobs = [
        (model, PROMPTS[i], Sampling(temperature=0.8, seed=i), 4 + 3 * i)
        for i in range(3)
        for model in ("tiny:full", "tiny:h2o")
    ]
    expected = [
        alone(server, model, Request(prompt, num, sampling)).text
        for model, prompt, sampling, num in jobs
    ]
    client = server.client()

    def ask(job: tuple[str, str, Sampling, int]) -> str:
        model, prompt, sampling, num = job
        stream = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=num,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stream=True,
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, jobs)) == expected


def test_characters_of_several_tokens_are_whole_in_a_stream() -> None:
    model = tiny_model(vocab=256, seed=3)
    with serving(plans_of(full=0), model=model, tokenizer=byte_tokenizer()) as running:
        options = {"max_tokens": 30, "temperature": 1.2, "seed": 4, "logprobs": 0}
        client = running.client()
        whole = client.completions.create(model="tiny", prompt="aé€", **options)  # type: ignore[call-overload]
        stream = client.completions.create(model="tiny", prompt="aé€", stream=True, **options)  # type: ignore[call-overload]
        pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole.choices[0].text
    assert whole.usage.completion_tokens == 30


def test_models_are_listed_and_described(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny", "tiny:full", "tiny:h2o"]
    model = client.models.retrieve("tiny:h2o")
    assert model.model_extra["max_model_len"] == 512
    plan = server.model.plans[1].engine.plan
    assert model.model_extra["kvpolicy"] == {"plan": "h2o", "digest": plan.digest(), "slots": 2}


def test_the_fingerprint_tells_plans_apart(server: Running) -> None:
    found = [
        server.client().completions.create(model=model, prompt="a", max_tokens=1)
        for model in ("tiny", "tiny:full", "tiny:h2o")
    ]
    prints = [one.system_fingerprint for one in found]
    assert prints[0] == prints[1] != prints[2]


# What is refused

REFUSED: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": [[1, 2], "a", 3]},
    {"prompt": [61]},
    {"prompt": [-1]},
    {"prompt": []},
    {"prompt": ["a"] * 65},
    {"prompt": "a" * 512},
    {"max_tokens": 512},
    {"max_tokens": 0},
    {"max_tokens": True},
    {"max_tokens": "9"},
    {"temperature": 2.1},
    {"temperature": -1},
    {"top_p": 0},
    {"n": 17},
    {"seed": -2},
    {"top_k": -2},
    {"stop_token_ids": [1] * 65},
    {"stop": [""]},
    {"stop": list("abcde")},
    {"stop": "a" * 257},
    {"logprobs": 21},
    {"logprobs": True},
    {"suffix": "end"},
    {"best_of": 2},
    {"tools": [{"type": "function"}]},
    {"functions": [{}]},
    {"response_format": {"type": "json_object"}},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"05": 1}},
    {"logit_bias": {"5": True}},
    {"logit_bias": [5]},
    {"presence_penalty": 2.5},
    {"frequency_penalty": "1"},
    {"stream_options": {"include_usage": True}},
    {"max_tokns": 3},
    {"kvpolicy": {"kept": True}},
]


def refusal_of(server: Running, change: dict[str, Any]) -> openai.BadRequestError:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2, **change}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(model="tiny", prompt="a", extra_body=body)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code
    return caught.value


def test_what_is_wrong_or_not_supported_is_refused(server: Running) -> None:
    params = {str(change): refusal_of(server, change).param or "" for change in REFUSED}
    wrong = {
        name: param
        for (name, param), (field,) in zip(params.items(), REFUSED, strict=True)
        if param.partition(".")[0] != field
    }
    assert not wrong
    assert refusal_of(server, {"kvpolicy": {"keep": True}}).param == "kvpolicy.keep"


NEUTRAL: list[dict[str, Any]] = [
    {"echo": False, "suffix": None, "best_of": 1, "logit_bias": {}, "tools": []},
    {"frequency_penalty": 0, "presence_penalty": 0.0, "response_format": {"type": "text"}},
    {"user": "someone", "n": None, "stop": None, "stream": None, "logprobs": None},
    {"top_k": 3, "top_p": 1, "temperature": 0, "seed": 2**64 - 1, "stream_options": None},
]


@pytest.mark.parametrize("change", NEUTRAL, ids=str)
def test_what_has_no_effect_is_accepted(server: Running, change: dict[str, Any]) -> None:
    body = {"max_tokens": 2, **change}
    found = server.client().completions.create(model="tiny", prompt="a", extra_body=body)
    assert found.usage is not None
    assert found.usage.completion_tokens == 2


@pytest.mark.parametrize("name", ["other", "tiny:", "tiny:../full", "/etc/passwd", "", "a" * 256])
def test_an_unknown_model_is_not_found(server: Running, name: str) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model=name, prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    if name:
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


FAILING = """
from torch import Tensor
from kvpolicy import hookimpl

class Failing:
    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        raise ValueError("no scores today")
"""


def test_a_failing_policy_ends_its_requests_and_not_the_server(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(FAILING)
    discovery.load_policy_file(file)
    with serving(plans_of(full=0, failing=12)) as running:
        client = running.client()
        with pytest.raises(openai.InternalServerError, match="no scores today") as caught:
            client.completions.create(model="tiny:failing", prompt="a" * 40)
        assert caught.value.code == "request_failed"
        stream = client.completions.create(model="tiny:failing", prompt="a" * 40, stream=True)
        with pytest.raises(openai.APIError, match="no scores today"):
            list(stream)
        for model in ("tiny", "tiny:failing"):  # short ones are not compacted
            found = client.completions.create(model=model, prompt="a", max_tokens=2)
            assert found.usage is not None
            assert found.usage.completion_tokens == 2


def test_an_engine_that_breaks_is_told_and_leaves_the_others() -> None:
    with serving(plans_of(full=0, h2o=12)) as running:
        break_next_step(running.model.plans[1], RuntimeError("a defect"))
        client = running.client()
        assert running.health() == (200, 200)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny:h2o", prompt="a")
        assert caught.value.status_code == 500
        assert running.health() == (503, 503), "whoever has the error finds the server not live"
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny:h2o", prompt="a")
        assert caught.value.status_code == 503
        with running.http() as http:
            assert 'outcome="failed",plan="h2o"} 2.0' in http.get("/metrics").text
        assert client.completions.create(model="tiny", prompt="a").usage is not None


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"temperature": 0.0}, Sampling()),
        ({"temperature": 2.0, "do_sample": False}, Sampling()),
        ({"temperature": 2.0, "top_k": 3}, Sampling(2.0, top_k=3, seed=5)),
        ({"top_p": 0}, Sampling()),
        ({"min_p": 1.0, "repetition_penalty": 1.4}, Sampling(repetition_penalty=1.4)),
    ],
    ids=str,
)
def test_what_a_body_leaves_out_is_as_the_generation_config_says(
    config: dict[str, Any], wanted: Sampling
) -> None:
    model = tiny_model()
    expected = Engine(model, tiny_tokenizer(), plans_of(full=0)["full"]).generate(
        ["the cat"], max_new_tokens=10, sampling=wanted
    )
    model.generation_config.update(**config)
    with serving(model=model) as running:
        answer = running.client().completions.create(
            model="tiny", prompt="the cat", max_tokens=10, seed=5
        )
    assert answer.choices[0].text == expected.results()[0].text
