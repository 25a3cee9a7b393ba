"""Prompts of the command line: texts, token ids or chats, each with the id that it was given.

A file has one prompt per line, or JSON lines: ``{"id": "a", "prompt": "..."}``, where the prompt
is a text or token ids, or ``{"id": 7, "messages": [{"role": "user", "content": "..."}]}``.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.cli.output import info
from kvpolicy.entry_points import nearest
from kvpolicy.errors import KVPolicyError, RequestError, error_summary
from kvpolicy.files import decode, numbered_lines, parse_json, read_text

_KEYS = ("id", "messages", "prompt")
_MESSAGE_KEYS = ("content", "role")


@attrs.frozen
class Prompt:
    """One prompt.

    Attributes:
        id: Its id in a JSON line, or else its number, counted from 0.
        content: A text, or token ids; empty for a chat.
        messages: The messages of a chat, to be put into the model's chat template.
        place: Where it was read, for messages.
    """

    id: int | str
    content: str | list[int]
    messages: tuple[dict[str, str], ...] = ()
    place: str = "the prompt"


def read_prompts(file: str) -> list[Prompt]:
    """Read prompts from a file, or standard input if it is ``-``, one per line.

    A file whose first line begins with ``{`` holds JSON lines. Empty lines are skipped.

    Args:
        file: Path of the file.

    Raises:
        KVPolicyError: The file cannot be read, has no prompt, a line is malformed, or two have the
            same id.
    """
    name = "standard input" if file == "-" else f"'{file}'"
    text = read_standard_input() if file == "-" else read_text(Path(file), name)
    lines = list(numbered_lines(text))
    if not lines:
        msg = f"{name} has no prompt; write one per line."
        raise KVPolicyError(msg)
    if not lines[0][1].lstrip().startswith("{"):
        return [Prompt(i, line) for i, (_, line) in enumerate(lines)]
    ignored: dict[str, None] = {}
    prompts = []
    for i, (number, line) in enumerate(lines):
        place = f"line {number} of {name}"
        record = _record(line, place)
        prompts.append(_prompt(record, i, place))
        ignored |= dict.fromkeys(key for key in record if key not in _KEYS)
    _check_ids(prompts)
    if ignored:
        keys = ", ".join(repr(key) for key in [*ignored][:9])
        info(f"{name} has keys that are not used: {keys}; used are {', '.join(_KEYS)}.")
    return prompts


def read_standard_input() -> str:
    """All of standard input, as text.

    Raises:
        KVPolicyError: It is not UTF-8.
    """
    return decode(sys.stdin.buffer.read(), "standard input")


def in_chat_template(prompts: Iterable[Prompt], tokenizer: Any, *, chat: bool) -> list[Prompt]:
    """Put messages into the model's chat template, up to where its answer begins.

    Args:
        prompts: The prompts; those of token ids are returned as they are.
        tokenizer: The model's tokenizer.
        chat: Whether texts are messages of a user.

    Raises:
        KVPolicyError: The tokenizer has no chat template, or the template refuses the messages.
    """
    return [_in_chat_template(one, tokenizer, chat=chat) for one in prompts]


def _in_chat_template(prompt: Prompt, tokenizer: Any, *, chat: bool) -> Prompt:
    messages: Sequence[Mapping[str, str]] = prompt.messages
    if chat and not messages and isinstance(prompt.content, str):
        messages = [{"role": "user", "content": prompt.content}]
    if not messages:
        return prompt
    if not getattr(tokenizer, "chat_template", None):
        what = f"{prompt.place} has messages" if prompt.messages else "--chat was given"
        hint = 'write a "prompt" instead' if prompt.messages else "omit --chat"
        msg = f"{what}, and this model's tokenizer has no chat template; {hint}."
        raise KVPolicyError(msg)
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # templates are programs, and raise errors of their own
        msg = f"{prompt.place}: the model's chat template refuses it: {error_summary(error)}."
        raise RequestError(msg) from error
    return attrs.evolve(prompt, content=[int(token) for token in encoded["input_ids"]])


def _record(line: str, place: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        msg = f"{place} is not JSON ({error}), though the file begins with '{{'."
        raise RequestError(msg) from error
    if not isinstance(record, dict):
        msg = f'{place} is {record!r:.60}; write an object with a "prompt" or "messages".'
        raise RequestError(msg)
    return record


def _prompt(record: Mapping[str, Any], number: int, place: str) -> Prompt:
    given = [key for key in ("prompt", "messages") if key in record]
    if len(given) == 2:
        msg = f'{place} has a "prompt" and "messages"; write one of them.'
        raise RequestError(msg)
    if not given:
        unknown = next((key for key in record if key not in _KEYS), None)
        hint = "write one of them" if unknown is None else f"unknown key '{unknown:.60}'"
        hint += nearest(unknown, _KEYS) if unknown is not None else "."
        msg = f'{place} has no "prompt" and no "messages"; {hint}'
        raise RequestError(msg)
    own_id = record.get("id")
    if own_id is not None and type(own_id) not in (int, str):
        msg = f'{place} has the id {own_id!r:.60}; write a text or a whole number, or no "id".'
        raise RequestError(msg)
    key = number if own_id is None else own_id
    if given == ["messages"]:
        return Prompt(key, [], _messages(record["messages"], place), place)
    prompt = record["prompt"]
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not is_ids and not isinstance(prompt, str):
        msg = f'{place} has no "prompt" that is a text or a list of token ids, but {prompt!r:.60}.'
        raise RequestError(msg)
    return Prompt(key, prompt, place=place)


def _messages(value: object, place: str) -> tuple[dict[str, str], ...]:
    problem = None
    if not isinstance(value, list) or not value:
        problem = f"is {value!r:.60}"
        value = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or sorted(message) != [*_MESSAGE_KEYS]:
            problem = problem or f"has {message!r:.60} as message {i}, counted from 0"
        elif not all(isinstance(text, str) for text in message.values()):
            problem = problem or f"has no text as role or content of message {i}, counted from 0"
    if problem is not None:
        msg = f'{place}: "messages" {problem}; write [{{"role": "user", "content": "TEXT"}}].'
        raise RequestError(msg)
    return tuple(value)


def _check_ids(prompts: Iterable[Prompt]) -> None:
    """Refuse two ids that read alike: results could not be told apart."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        other = first.setdefault(str(prompt.id), prompt)
        if other is not prompt:
            msg = (
                f"{other.place} and {prompt.place.partition(' of ')[0]} have the id "
                f"{prompt.id!r:.60}; give each prompt its own (a line without one has its number, "
                "counted from 0)."
            )
            raise RequestError(msg)
