"""Prompts in a model's chat template."""

from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.task import Example


def wrap(examples: Sequence[Example], tokenizer: Any) -> list[Example]:
    """Wrap users' messages in the model's chat template, up to where the answer begins.

    The templates of DeepSeek-R1's models end with ``<think>`` and a newline, as its authors
    advise, so that the model thinks. There is no system prompt.

    Args:
        examples: Examples; those without ``chat`` are returned unchanged.
        tokenizer: The model's tokenizer.

    Raises:
        TaskError: The tokenizer has no chat template.
    """
    return [_wrap(example, tokenizer) if example.chat else example for example in examples]


def encode(example: Example, tokenizer: Any) -> str | list[int]:
    """The prompt of an example as the engine takes it.

    Args:
        example: The example, after `wrap`.
        tokenizer: The model's tokenizer.

    Returns:
        The text; token ids for a chat. A template writes the special tokens itself, so the
        tokenizer must not add them a second time.
    """
    if not example.chat:
        return example.prompt
    ids: list[int] = tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
    return ids


def _wrap(example: Example, tokenizer: Any) -> Example:
    if not getattr(tokenizer, "chat_template", None):
        msg = (
            "the task asks its questions in a chat, and this model's tokenizer has no chat "
            "template; give the task the option chat=false to ask without one"
        )
        raise TaskError(msg)
    messages = [{"role": "user", "content": example.prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return attrs.evolve(example, prompt=str(text))
