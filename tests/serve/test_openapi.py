"""The OpenAPI document says what is accepted, what is refused, and what answers look like."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from serving import Running

ALIKE: dict[str, list[Any]] = {
    "model": ["tiny", "tiny:h2o", None, 3],
    "max_tokens": [1, 3, None, 0, -1, True, "2"],
    "temperature": [0, 0.5, 2, None, -1, 2.5, "0", False],
    "top_p": [1, 0.5, None, 0, 1.5],
    "top_k": [-1, 0, 3, 3.0, None, -2, 1.5],
    "frequency_penalty": [0, -2, 1.5, None, 3, True],
    "logit_bias": [{}, None, {"5": 1, "0": -0.5}, {"5": 101}, {"a": 1}, {"5": True}, [5]],
    "n": [1, 2, None, 0, 17, True],
    "seed": [-1, 5, None, -2, "5"],
    "stop": ["a", ["a", "b"], [], None, "", ["a", ""], ["a"] * 5, "a\0", "a" * 257, 3],
    "stop_token_ids": [[], [5], None, 5, ["5"]],
    "ignore_eos": [True, False, None, 1],
    "stream": [True, False, None, "true"],
    "stream_options": [{"include_usage": True}, {"include_usage": None}, None, {"more": 1}, True],
    "kvpolicy": [{"token_ids": True}, {"kept": True}, {"kept": None}, {}, None, {"more": 1}, 3],
    # Fields that are not served
    "user": ["me", 3, None, {"a": [1]}],
    "min_p": [0, 0.0, None, 0.5, False],
    "echo": [False, None, 0],
    "response_format": [{"type": "text"}, None, {"type": "json_object"}],
    "tools": [[], None, [{"a": 1}], [3]],
    "tool_choice": ["none", "auto", None, "required"],
    "no_such_field": [None, 1],
}
MESSAGES: list[Any] = [
    {"role": "user", "content": "who?"},
    {"role": "system", "content": [{"type": "text", "text": "be", "more": 1}], "id": "m"},
    {"role": "assistant", "content": [], "name": "a", "tool_calls": [], "reasoning_content": "b"},
    {"role": "tool", "content": "a"},
    {"role": "user", "content": "a\0"},
    {"role": "user", "content": [{"type": "image"}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:", "size": 3}}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]},
    {"role": "user", "content": None},
    {"role": "user", "content": "a", "tool_calls": [{}]},
    {"role": "user"},
]
PATHS: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "/v1/completions": (
        "prompt",
        {
            "prompt": ["a", ["a", "b"], [5, 6.0], [[5], [6, 7]], [], [[]], "a\0", [-1], [5, "a"]],
            "logprobs": [0, 2, None, 21, -1, True],
            "suffix": ["", None, "a"],
            **ALIKE,
        },
    ),
    "/v1/chat/completions": (
        "messages",
        {
            "messages": [MESSAGES[:1], MESSAGES[:3], [], None, *([one] for one in MESSAGES)],
            "max_completion_tokens": [2, None, 0],
            "logprobs": [True, False, None, 1],
            "top_logprobs": [0, 2, None, 21],
            "add_generation_prompt": [True, False, None],
            "continue_final_message": [True, False, None, 0],
            "verbosity": ["medium", None, "high"],
            **ALIKE,
        },
    ),
}


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Fields with values that are mostly right, the others wrong in some way."""
    asked, fields = PATHS[path]
    pairs = [(name, value) for name, values in fields.items() for value in values]

    def body_of(chosen: list[tuple[str, Any]]) -> dict[str, Any]:
        body = {name: fields[name][0] for name in ("model", asked)} | {"max_tokens": 2}
        body |= dict(chosen)
        if not isinstance(body.get("max_tokens"), int):
            body.pop("max_tokens", None)
            body["max_completion_tokens" if asked == "messages" else "max_tokens"] = 2
        return body

    return st.lists(st.sampled_from(pairs), max_size=4).map(body_of)


def closed(schema: Any) -> Any:
    """A schema of answers with which a field that is not described is wrong."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    return {**found, "additionalProperties": False} if "properties" in found else found


def checker(document: dict[str, Any], described: Any) -> Draft202012Validator:
    """Of a schema in a document."""
    return Draft202012Validator({**described, "components": document["components"]})


@pytest.fixture(scope="module")
def document(server: Running) -> dict[str, Any]:
    with server.http() as http:
        found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def test_every_answer_that_is_sent_is_described(document: dict[str, Any]) -> None:
    assert document["paths"].keys() == {*PATHS, "/v1/models", "/v1/models/{model_id}"}
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["responses"].keys() == {"200", "4XX", "5XX"}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@given(data=st.data())
def test_a_body_is_accepted_exactly_if_its_schema_says_so(
    path: str, server: Running, document: dict[str, Any], data: st.DataObject
) -> None:
    operation = document["paths"][path]["post"]
    (taken,) = (one["schema"] for one in operation["requestBody"]["content"].values())
    answers = {
        status: one["content"]["application/json"]["schema"]
        for status, one in operation["responses"].items()
    }
    answered = closed(document)
    drawn = data.draw(st.lists(bodies(path), min_size=5, max_size=5))
    with server.http() as http:
        for body in drawn:
            got = http.post(path, json=body)
            wanted = 200 if checker(document, taken).is_valid(body) else 400
            assert got.status_code == wanted, (body, got.text)
            if got.headers["content-type"] == "application/json":
                described = answers["200" if wanted == 200 else "4XX"]
                checker(answered, described).validate(got.json())
            else:
                assert "text/event-stream" in operation["responses"]["200"]["content"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model_id}"])
def test_models_are_as_described(path: str, server: Running, document: dict[str, Any]) -> None:
    operation, answered = document["paths"][path]["get"], closed(document)
    with server.http() as http:
        for name, status in {"tiny": "200", "none": "4XX"}.items():
            if status == "200" or "{" in path:
                described = operation["responses"][status]["content"]["application/json"]["schema"]
                got = http.get(path.format(model_id=name)).json()
                checker(answered, described).validate(got)
