"""A request that the model can answer: a problem of its own task, or a question."""

import json
from collections.abc import Mapping
from shlex import quote
from typing import Any

from kvpolicy.entry_points import installed, load_installed
from kvpolicy.errors import KVPolicyError
from kvpolicy.plugin_code import plugin_code
from kvpolicy.serve.plans import ServedModel
from kvpolicy.serve.settings import KEYS

_TASKS = "kvpolicy.tasks"
_MARK = "kvpolicy-message"  # where the template puts a message
_QUESTION = "What is 6 times 7?"


def example_question(model: ServedModel) -> str | None:
    """A message for a chat with the model; ``None`` if it has no chat template.

    Args:
        model: The model.
    """
    if not getattr(model.tokenizer, "chat_template", None):
        return None
    problem = _problem(model)
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


def example_request(model: ServedModel) -> tuple[str, dict[str, Any]]:
    """The path of an endpoint, and a body for it.

    Args:
        model: The model.
    """
    body: dict[str, Any] = {"model": model.name, "max_tokens": 400}
    question = example_question(model)
    if question is None:
        prompt = _problem(model) or "6 times 7 is"
        return "/v1/completions", {**body, "prompt": prompt}
    messages = [{"role": "user", "content": question}]
    return "/v1/chat/completions", {**body, "messages": messages}


def _problem(model: ServedModel) -> str | None:
    """A prompt of the task that an installed model comes with."""
    if model.name not in installed(_TASKS):
        return None
    make_task = load_installed(_TASKS, model.name, what="task")
    with plugin_code(f"task '{model.name}' is broken", KVPolicyError):
        (example,) = make_task().examples(1, seed=0)
        return str(example.prompt)


def curl_line(url: str, path: str, body: Mapping[str, Any], *, with_key: bool) -> str:
    """A command that sends a request.

    Args:
        url: Address of the server.
        path: Path of the endpoint.
        body: The body.
        with_key: Whether the server asks for a key.
    """
    headers = ["-H 'Content-Type: application/json'"]
    if with_key:
        headers.append(f'-H "Authorization: Bearer ${KEYS}"')
    return f"curl {url}{path} {' '.join(headers)} -d {quote(json.dumps(body))}"
