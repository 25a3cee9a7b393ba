"""Every field that clients send: served, taken because it changes nothing, or refused by name."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from refresh_fields import PAGE, WHERE, listed, table
from serving import CHAT_TEMPLATE, Running, serving
from tiny import greedy_tokens, tiny_model, tiny_tokenizer

from kvpolicy import Engine, Plan, Request, Sampling
from kvpolicy.serve.bodies import ChatBody, CompletionBody, Message, StreamOptions
from kvpolicy.serve.fields import CHAT, COMPLETION, MESSAGE, STREAM_OPTIONS, Unserved

# Arguments that the package keeps for itself.
OF_THE_CLIENT = {"extra_headers", "extra_query", "extra_body", "timeout"}
TALK: list[Any] = [{"role": "user", "content": "who?"}]
# A value of a field of any kind that asks for something.
ASKING: dict[str, object] = {"tool_choice": "required", "function_call": {"name": "f"}}


def parameters(create: Any) -> set[str]:
    return {*inspect.signature(create).parameters} - OF_THE_CLIENT


def harmless(fields: Mapping[str, Unserved]) -> dict[str, list[object]]:
    """Values of each field that change nothing; of those that take anything, two."""
    return {
        name: [*field.harmless, None] if field.harmless is not None else [{"a": [1]}, "text"]
        for name, field in fields.items()
    }


def test_every_parameter_of_the_package_is_known() -> None:
    client = openai.OpenAI(api_key="none", base_url="http://127.0.0.1:1/v1")
    chat = parameters(client.chat.completions.create)
    completion = parameters(client.completions.create)
    client.close()
    assert chat - {*ChatBody.model_fields, *CHAT} == set()
    assert completion - {*CompletionBody.model_fields, *COMPLETION} == set()


def test_a_field_is_served_or_not() -> None:
    assert not CHAT.keys() & ChatBody.model_fields.keys()
    assert not COMPLETION.keys() & CompletionBody.model_fields.keys()
    assert not MESSAGE.keys() & Message.model_fields.keys()
    assert not STREAM_OPTIONS.keys() & StreamOptions.model_fields.keys()


def test_the_reference_has_every_field() -> None:
    assert listed() == table()
    page = PAGE.read_text(encoding="utf-8")
    served = {*ChatBody.model_fields, *CompletionBody.model_fields}
    assert [name for name in sorted(served) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("number", [0, 1])
def test_what_changes_nothing_is_taken(server: Running, number: int) -> None:
    create = server.client().chat.completions.create
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "temperature": 0}
    plain = create(messages=TALK, **given)
    extra = {name: values[min(number, len(values) - 1)] for name, values in harmless(CHAT).items()}
    of_message = {name: values[number - 1] for name, values in harmless(MESSAGE).items()}
    message: Any = {**TALK[0], **of_message, "id": "m1", "refusal": "", "annotations": [{"a": 1}]}
    neutral = {"top_k": -1, "ignore_eos": False, "stop_token_ids": [], "kvpolicy": None}
    found = create(messages=[message], **given, extra_body={**extra, **neutral})
    assert found.choices[0].message.content == plain.choices[0].message.content
    text = server.client().completions.create(
        prompt="u:who?\na:",
        **given,
        extra_body={name: values[number - 1] for name, values in harmless(COMPLETION).items()},
    )
    assert text.choices[0].text == plain.choices[0].message.content


def test_tools_that_are_not_to_be_used_are_passed_over(server: Running) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    found = server.client().chat.completions.create(
        model="tiny", messages=TALK, max_tokens=1, tools=tools, tool_choice="none"
    )
    assert found.usage is not None
    assert found.usage.prompt_tokens == len("u:who?\na:")


@pytest.mark.slow
def test_what_would_change_something_is_refused_by_its_name(server: Running) -> None:
    create = server.client().chat.completions.create
    wrong: list[tuple[str, str, str | None]] = []
    for where, fields in WHERE.items():
        for name, field in fields.items():
            if field.harmless is None:
                continue
            asking = {name: ASKING.get(name, 0.125)}
            body: dict[str, Any] = asking
            if where == "messages":
                body = {"messages": [{**TALK[0], **asking}]}
            call: Any = create
            if where == "completions":
                call = lambda *, messages, **given: server.client().completions.create(  # noqa: E731
                    prompt="a", **given
                )
            try:
                call(model="tiny", messages=TALK, max_tokens=1, extra_body=body)
            except openai.BadRequestError as error:
                wrong += [] if str(error.param).endswith(name) else [(where, name, error.param)]
            else:
                wrong.append((where, name, "taken"))
    assert wrong == []


def test_marks_of_a_cache_in_a_part_change_nothing(server: Running) -> None:
    part = {"type": "text", "text": "who?", "cache_control": {"type": "ephemeral"}}
    counts = []
    for content in ("who?", [part], [{**part, "prompt_cache_breakpoint": {}}]):
        talk: Any = [{"role": "user", "content": content}]
        found = server.client().chat.completions.create(model="tiny", messages=talk, max_tokens=1)
        assert found.usage is not None
        counts.append(found.usage.prompt_tokens)
    assert counts == [len("u:who?\na:")] * 3


@pytest.mark.parametrize("kind", ["input_audio", "input_image", "video_url", "file"])
def test_a_part_that_is_neither_text_nor_an_image_is_refused(server: Running, kind: str) -> None:
    talk: Any = [{"role": "user", "content": [{"type": "text", "text": "who?"}, {"type": kind}]}]
    with pytest.raises(openai.BadRequestError, match=kind) as refused:
        server.client().chat.completions.create(model="tiny", messages=talk, max_tokens=1)
    assert refused.value.param == "messages[0].content[1].type"


# What is done


def test_end_tokens_end_a_choice_unless_they_are_to_be_ignored() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    prompt = [3, 1, 4]
    tokens = greedy_tokens(tiny_model(), prompt, 12)
    end = tokens[2]
    model = tiny_model()
    model.generation_config.eos_token_id = end
    at = tokens.index(end) + 1
    other = next(token for token in tokens[at:] if token != end)
    with serving(model=model, tokenizer=tokenizer) as running:

        def generated(**extra: Any) -> tuple[int, str]:
            found = running.client().completions.create(
                model="tiny", prompt=prompt, max_tokens=12, temperature=0, extra_body=extra
            )
            assert found.usage is not None
            return found.usage.completion_tokens, found.choices[0].finish_reason

        assert generated() == (at, "stop")
        assert generated(ignore_eos=True) == (12, "length")
        ends = tokens.index(other) + 1
        assert generated(ignore_eos=True, stop_token_ids=[other]) == (ends, "stop")
        assert generated(stop_token_ids=[other]) == (min(at, ends), "stop")
        assert generated(kvpolicy={"stop_ids": []}, stop_token_ids=[end]) == (at, "stop")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"min_p": 1.0, "temperature": 1.5}, Request("a cat", 12, Sampling())),
        ({"top_k": -1, "top_p": 1}, Request("a cat", 12, Sampling(1.0, seed=7))),
        (
            {"repetition_penalty": 1.7, "temperature": 0},
            Request("a cat", 12, Sampling(repetition_penalty=1.7)),
        ),
        (
            {"frequency_penalty": 1.5, "presence_penalty": -0.5, "temperature": 0},
            Request("a cat", 12, Sampling(frequency_penalty=1.5, presence_penalty=-0.5)),
        ),
        (
            {"logit_bias": {"3": 100, "7": -100}, "temperature": 0},
            Request("a cat", 12, Sampling(logit_bias={3: 100, 7: -100})),
        ),
        (
            {"min_tokens": 9, "temperature": 0, "stop_token_ids": [*range(30)]},
            Request("a cat", 12, Sampling(), stop_ids=tuple(range(30)), min_new_tokens=9),
        ),
    ],
    ids=str,
)
def test_sampling_of_other_servers_is_that_of_the_engine(
    server: Running, asked: dict[str, Any], wanted: Request
) -> None:
    engine = Engine(server.plan.engine.adapter.model, server.model.tokenizer, Plan.uniform("full"))
    (expected,) = engine.generate([wanted]).results()
    found = server.client().completions.create(
        model="tiny", prompt="a cat", max_tokens=12, seed=7, extra_body=asked
    )
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason


def test_a_seed_of_minus_one_is_drawn(server: Running) -> None:
    texts = {
        server.client()
        .completions.create(model="tiny", prompt="a", max_tokens=12, temperature=1, seed=-1)
        .choices[0]
        .text
        for _ in range(4)
    }
    assert len(texts) > 1


@pytest.mark.parametrize("chat", [False, True])
def test_every_event_of_a_stream_has_the_tokens_so_far(server: Running, chat: bool) -> None:
    options: Any = {
        "model": "tiny",
        "max_tokens": 6,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    client = server.client()
    events: list[Any] = list(
        client.chat.completions.create(messages=TALK, **options)
        if chat
        else client.completions.create(prompt="a", **options)
    )
    prompt = len("u:who?\na:") if chat else 1
    assert {event.usage.prompt_tokens for event in events} == {prompt}
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 12
    assert all(one.usage.total_tokens == prompt + one.usage.completion_tokens for one in events)


# As these clients have sent them; prompt and messages are those of the test.
OF_BENCHMARKS: dict[str, tuple[str, dict[str, Any]]] = {
    "guidellm, chats": (
        "/v1/chat/completions",
        {
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 8,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "who?"}]}],
        },
    ),
    "guidellm, completions": (
        "/v1/completions",
        {
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 8,
            "ignore_eos": True,
            "prompt": "who?",
        },
    ),
    "vllm bench serve": (
        "/v1/completions",
        {
            "stream_options": {"include_usage": True},
            "repetition_penalty": 1.0,
            "logprobs": None,
            "max_tokens": 8,
            "ignore_eos": True,
            "prompt": "who?",
        },
    ),
}


@pytest.mark.parametrize("name", OF_BENCHMARKS)
def test_requests_of_benchmarks_are_answered(server: Running, name: str) -> None:
    path, body = OF_BENCHMARKS[name]
    with server.http() as http:
        answer = http.post(path, json={"model": "tiny", "stream": True, **body})
    assert answer.status_code == 200
    *events, done = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert done == "data: [DONE]"
    assert json.loads(events[-1].removeprefix("data: "))["usage"]["completion_tokens"] == 8


THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }};{% endif %}"
    "{% for m in messages %}{{ m.role[0] + ':' + (m.reasoning_content or '') + m.content + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


@pytest.mark.slow
def test_the_template_is_given_what_it_reads() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING
    said: list[Any] = [*TALK, {"role": "assistant", "content": "it", "reasoning_content": "hm."}]
    with serving(tokenizer=tokenizer) as running:

        def answer(prompt: str | None = None, **extra: Any) -> str | None:
            client, given = running.client(), {"model": "tiny", "max_tokens": 8, "temperature": 0}
            if prompt is not None:
                found = client.completions.create(prompt=prompt, **given)  # type: ignore[call-overload]
                return str(found.choices[0].text)
            chat = client.chat.completions.create(messages=said, extra_body=extra, **given)  # type: ignore[call-overload]
            return str(chat.choices[0].message.content)

        assert answer() == answer("u:who?\na:hm.it\na:")
        assert answer(add_generation_prompt=False) == answer("u:who?\na:hm.it\n")
        assert answer(continue_final_message=True) == answer("u:who?\na:hm.it")
        thinking = {"enable_thinking": False}
        assert answer(chat_template_kwargs=thinking) == answer("!u:who?\na:hm.it\na:")
        assert answer(reasoning_effort="low") == answer("low;u:who?\na:hm.it\na:")
        for name in ("enable_thinkin", "messages", "chat_template", "tokenize"):
            with pytest.raises(openai.BadRequestError) as caught:
                answer(chat_template_kwargs={name: "a"})
            assert caught.value.param == "chat_template_kwargs"
