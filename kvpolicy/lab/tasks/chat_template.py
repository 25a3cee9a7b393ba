"""Prompts as a chat model is used to them."""

from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.task import Item


def wrap(items: Sequence[Item], tokenizer: Any) -> list[Item]:
    """Wrap what users say in the model's own chat template, up to where the answer begins.

    The templates of DeepSeek-R1's models end with ``<think>`` and a newline, as its authors
    advise, so that such a model thinks; there is no system prompt.

    Args:
        items: Items; those that are no chat stay as they are.
        tokenizer: The model's tokenizer.

    Raises:
        TaskError: The tokenizer has no chat template.
    """
    return [_wrap(item, tokenizer) if item.chat else item for item in items]


def encode(item: Item, tokenizer: Any) -> str | list[int]:
    """What the engine is given for a prompt.

    Args:
        item: The item, after `wrap`.
        tokenizer: The model's tokenizer.

    Returns:
        The text; token ids for a chat, whose template has written the special tokens already:
        tokenized as text it would begin with two of them.
    """
    if not item.chat:
        return item.prompt
    ids: list[int] = tokenizer(item.prompt, add_special_tokens=False)["input_ids"]
    return ids


def _wrap(item: Item, tokenizer: Any) -> Item:
    if not getattr(tokenizer, "chat_template", None):
        msg = (
            "the task asks its questions in a chat, and this model's tokenizer has no chat "
            "template; give the task the option chat=false to ask without one"
        )
        raise TaskError(msg)
    messages = [{"role": "user", "content": item.prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return attrs.evolve(item, prompt=str(text))
