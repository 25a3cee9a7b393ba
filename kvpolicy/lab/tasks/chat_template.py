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
    advise, so that the model thinks. There is no system prompt.

    Args:
        examples: Examples; those without ``chat`` are returned unchanged.
        tokenizer: The model's tokenizer.

    Raises:
        TaskError: The tokenizer has no chat template, or the template refuses a message.
    """
    if not any(example.chat for example in examples):
        return list(examples)
    if not has_chat_template(tokenizer):
        msg = (
            "the task asks its questions in a chat, and this model's tokenizer has no chat "
            "template; give the task the option chat=false to ask without one"
        )
        raise TaskError(msg)
    encoder = ChatEncoder(tokenizer)

    def wrapped(example: Example) -> Example:
        shown = _rendered(example.prompt, encoder, example.index).shown
        return attrs.evolve(example, prompt=shown, message=example.prompt)

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
            return encoder.encode(_rendered(example.message, encoder, example.index))
        except RequestError as error:
            msg = f"example {example.index}: {error}"
            raise TaskError(msg) from error

    return [encoded(example) for example in examples]


def _rendered(message: str, encoder: ChatEncoder, index: int) -> RenderedChat:
    try:
        return encoder.render([{"role": "user", "content": message}])
    except RequestError as error:
        msg = f"example {index}: {error}"
        raise TaskError(msg) from error
