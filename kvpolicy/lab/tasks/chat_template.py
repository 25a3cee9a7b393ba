"""Prompts in a model's chat template."""

from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.errors import RequestError, TaskError
from kvpolicy.lab.tasks.task import Example
from kvpolicy.model.chat import ChatEncoder, RenderedChat, has_chat_template


def wrap(examples: Sequence[Example], tokenizer: Any) -> list[Example]:
    """Put users' messages into the model's chat template, up to where the answer begins.

    The templates of DeepSeek-R1's models end with ``<think>`` and a newline, as its authors
    advise, so that the model thinks. Without a system prompt of the example, what stands there is
    the template's own.

    Args:
        examples: Examples; those without ``chat`` are returned unchanged.
        tokenizer: The model's tokenizer.

    Raises:
        TaskError: The tokenizer has no chat template, or the template refuses a message or leaves
            out a system prompt.
    """
    if not any(example.chat for example in examples):
        return list(examples)
    if not has_chat_template(tokenizer):
        has_system = any(example.system is not None for example in examples)
        what, instead = (
            ("a chat with a system prompt", "choose a model that was trained to chat")
            if has_system
            else ("a chat", "give the task the option chat=false to ask without one")
        )
        msg = (
            f"the task asks its questions in {what}, and this model's tokenizer has no chat "
            f"template; {instead}"
        )
        raise TaskError(msg)
    encoder = ChatEncoder(tokenizer)

    def wrapped(example: Example) -> Example:
        asked = attrs.evolve(example, message=example.prompt)
        shown = _rendered(asked, encoder).shown
        if example.system is not None and example.system not in shown:
            msg = "the task has a system prompt, which the chat template of this model leaves out"
            raise TaskError(msg)
        return attrs.evolve(asked, prompt=shown)

    return [wrapped(example) if example.chat else example for example in examples]


def encode(examples: Sequence[Example], tokenizer: Any) -> list[str | list[int]]:
    """The prompts of examples as the engine takes them.

    Args:
        examples: The examples, after `wrap`.
        tokenizer: The model's tokenizer.

    Returns:
        For each, its text; token ids for a chat: control tokens are the template's, and a special
        token that is written in a message is text.

    Raises:
        TaskError: Text of a message would be read as a control token.
    """
    if all(example.message is None for example in examples):
        return [example.prompt for example in examples]
    encoder = ChatEncoder(tokenizer)

    def encoded(example: Example) -> str | list[int]:
        if example.message is None:
            return example.prompt
        try:
            return encoder.encode(_rendered(example, encoder))
        except RequestError as error:
            msg = f"example {example.index}: {error}"
            raise TaskError(msg) from error

    return [encoded(example) for example in examples]


def _rendered(example: Example, encoder: ChatEncoder) -> RenderedChat:
    messages = [{"role": "user", "content": example.message}]
    if example.system is not None:
        messages.insert(0, {"role": "system", "content": example.system})
    try:
        return encoder.render(messages)
    except RequestError as error:
        msg = f"example {example.index}: {error}"
        raise TaskError(msg) from error
