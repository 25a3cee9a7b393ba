"""Requests that a server refuses, and commands that start none."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from tiny_processor import picture, url_of

from kvpolicy.cli.app import run
from kvpolicy.serve.api_errors import ApiError, from_validation
from kvpolicy.serve.bodies import ChatBody, CompletionBody, Message
from kvpolicy.serve.images import ImageReader

TALK = [{"role": "user", "content": "a"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def refused(kind: type[BaseModel], **fields: Any) -> str:
    """The message for a client that sends a body."""
    try:
        kind.model_validate(fields)
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        return str(from_validation(RequestValidationError(found)).body()["error"]["message"])
    raise AssertionError(fields)


def completion(**fields: Any) -> Callable[[Path], str]:
    return lambda _: refused(CompletionBody, **({"model": "tiny", "prompt": "a"} | fields))


def chat(**fields: Any) -> Callable[[Path], str]:
    return lambda _: refused(ChatBody, **({"model": "tiny", "messages": TALK} | fields))


def serve(*words: object) -> Callable[[Path], str]:
    """What `kvpolicy serve` prints to stderr."""

    def printed(folder: Path) -> str:
        (folder / "small.toml").write_text('stack = ["h2o"]\nbudget = 16\nbuffer = 8\n')
        given = [str(word).replace("FOLDER", str(folder)) for word in words]
        with contextlib.redirect_stderr(io.StringIO()) as err:
            assert run(["serve", "--model", str(folder / "none"), "--port", "0", *given]) == 2
        return err.getvalue()

    return printed


def no_body(_: Path) -> str:
    """As FastAPI tells that a body is empty."""
    missing = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
    return str(from_validation(RequestValidationError([missing])).body()["error"]["message"])


def other_body(content: object) -> Callable[[Path], str]:
    """A body of JSON that is no object."""

    def told(_: Path) -> str:
        wrong = {"type": "model_attributes_type", "loc": ("body",), "msg": "", "input": content}
        return str(from_validation(RequestValidationError([wrong])).body()["error"]["message"])

    return told


def image(**fields: Any) -> Callable[[Path], str]:
    """A message with an image, given by these fields."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", **fields}}
    return chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])


def read(url: str) -> Callable[[Path], str]:
    """An image that is to be decoded."""

    def told(_: Path) -> str:
        message = Message(role="user", content=[{"type": "image_url", "image_url": {"url": url}}])
        try:
            ImageReader(max_pixels=100).read([message])
        except ApiError as error:
            return str(error.body()["error"]["message"])
        raise AssertionError(url)

    return told


CASES: dict[str, Callable[[Path], object]] = {
    "no body": no_body,
    "a list for a body": other_body([1, 2]),
    "a text for a body": other_body("hello"),
    "no new tokens": completion(max_tokens=0),
    "a number as text": completion(max_tokens="9"),
    "a temperature that is too high": completion(temperature=2.1),
    "prompts of several kinds": completion(prompt=[[1, 2], "a", 3]),
    "an empty stop string": completion(stop=[""]),
    "what is not supported": completion(suffix="b"),
    "an echo in a stream": completion(echo=True, stream=True),
    "a misspelled field": completion(max_tokns=3),
    "a misspelled field of ours": completion(kvpolicy={"keep": True}),
    "options of a stream without one": completion(stream_options={"include_usage": True}),
    "a list that is too long": completion(stop_token_ids=[7] * 65),
    "an object for a text": completion(model={"a": 1}),
    "a long text for a number": completion(max_tokens="9" * 500),
    "no messages": chat(messages=[]),
    "too many messages": chat(messages=TALK * 2049),
    "calls of tools": chat(messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}]),
    "tools": chat(tools=[{"type": "function", "function": {"name": "f"}}]),
    "a message of a tool": chat(messages=[{"role": "tool", "content": "a"}]),
    "two limits that differ": chat(max_tokens=2, max_completion_tokens=3),
    "alternatives without log-probabilities": chat(top_logprobs=2),
    "a content that is none": chat(messages=[{"role": "user", "content": 5}]),
    "a sound": chat(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]),
    "the address of an image": image(url="https://example.com/a.png"),
    "a resolution": image(detail="high"),
    "too many images": chat(messages=[{"role": "user", "content": [IMAGE]}] * 17),
    "an image without base64": read("data:image/png,abc"),
    "an image with half of its base64": read("data:image/png;base64,iVBORw0KG"),
    "an image that is a text": read("data:image/png;base64,aGVsbG8="),
    "an image that is too large": read(url_of(picture(0))),
    "an image that is cut": read(url_of(picture(0, 8, 8))[:-40]),
    "slots and memory": serve("--slots", 2, "--kv-memory", "1GiB"),
    "a size without its unit": serve("--kv-memory", "8G"),
    "two plans of one name": serve("--plan", "FOLDER/small.toml", "--plan", "FOLDER/small.toml"),
    "a plan and a policy": serve("--plan", "FOLDER/small.toml", "--policy", "h2o"),
    "a budget without a policy": serve("--budget", 9),
    "a key that no header can hold": serve("--api-key", "é"),
    "a model that is not there": serve("--policy", "full"),
    "replicas without Ray": serve("--replicas", 2),
}
