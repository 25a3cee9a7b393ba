"""A request that the model can answer: a problem of its own task, or a question."""

import json
from shlex import quote
from typing import Any

from kvpolicy.entry_points import installed, load_installed
from kvpolicy.errors import KVPolicyError
from kvpolicy.model.chat import has_chat_template
from kvpolicy.plugin_code import plugin_code
from kvpolicy.serve.plans import ServedModel

_TASKS = "kvpolicy.tasks"
_MARK = "kvpolicy-message"  # where the template puts a message
_QUESTION = "What is 6 times 7?"
_MOST_TOKENS = 1000  # of an answer to a problem: a completion ends after a few unless it says more

# The path of an endpoint, and a body for it.
ExampleRequest = tuple[str, dict[str, Any]]


def example_question(model: ServedModel) -> str | None:
    """A message for a chat with the model; ``None`` if it has no chat template.

    Args:
        model: The model.
    """
    if not has_chat_template(model.tokenizer):
        return None
    problem = _problem(model.name)
    if problem is None:
        return _QUESTION
    talk = [{"role": "user", "content": _MARK}]
    try:
        text = model.tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    except Exception:  # templates are programs
        return _QUESTION
    before, _, after = str(text).partition(_MARK)
    is_chat = problem.startswith(before) and problem.endswith(after)
    return problem.removeprefix(before).removesuffix(after) if is_chat else _QUESTION


def example_request(model: ServedModel, most: int | None = None) -> ExampleRequest:
    """A chat with the model, or a completion if it has no chat template; both end by themselves.

    Args:
        model: The model.
        most: The most new tokens that the server lets a client ask for, if it says so.
    """
    question = example_question(model)
    if question is None:
        return example_completion(model.name, most)
    messages = [{"role": "user", "content": question}]
    return "/v1/chat/completions", {"model": model.name, "messages": messages}


def example_completion(name: str, most: int | None = None) -> ExampleRequest:
    """A completion of a model that need not be loaded.

    Args:
        name: Its name.
        most: As for `example_request`.
    """
    problem = _problem(name)
    if problem is None:
        return "/v1/completions", {"model": name, "prompt": "6 times 7 is"}
    max_tokens = _MOST_TOKENS if most is None else min(most, _MOST_TOKENS)
    return "/v1/completions", {"model": name, "prompt": problem, "max_tokens": max_tokens}


def curl_line(url: str, request: ExampleRequest, key_variable: str | None) -> str:
    """A line for a shell that sends a request.

    Args:
        url: Address of the server.
        request: What to send.
        key_variable: The environment variable that holds a key; ``None``: the server needs none.
    """
    path, body = request
    headers = ["-H 'Content-Type: application/json'"]
    if key_variable is not None:
        headers.append(f'-H "Authorization: Bearer ${key_variable}"')
    return f"curl {url}{path} {' '.join(headers)} -d {quote(json.dumps(body))}"


def _problem(name: str) -> str | None:
    """A prompt of the task that an installed model comes with."""
    if name not in installed(_TASKS):
        return None
    make_task = load_installed(_TASKS, name, what="task")
    with plugin_code(f"task '{name}' is broken", KVPolicyError):
        (example,) = make_task().examples(1, seed=0)
        return str(example.prompt)
