"""Where the prompts of ``kvpolicy run`` come from."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicy.errors import KVPolicyError, RequestError

Prompt = str | list[int]


def read_prompts(file: str) -> list[Prompt]:
    """Read prompts from a file, one per line.

    A file whose first line begins with ``{`` holds JSON lines; each has a ``prompt``, a text
    or a list of token ids. Empty lines are skipped.

    Args:
        file: Path of the file, or ``-`` for standard input.

    Returns:
        The prompts, at least one.

    Raises:
        KVPolicyError: The file cannot be read, holds no prompt, or a line is malformed.
    """
    name = "standard input" if file == "-" else f"'{file}'"
    lines = [(i, line) for i, line in enumerate(_read(file, name).splitlines(), 1) if line.strip()]
    if not lines:
        msg = f"{name} holds no prompt; give one per line."
        raise KVPolicyError(msg)
    if lines[0][1].lstrip().startswith("{"):
        return [_json_prompt(line, f"line {number} of {name}") for number, line in lines]
    return [line for _, line in lines]


def read_stdin() -> str:
    """Read all of standard input as one prompt, less the newline at its end."""
    return _read("-", "standard input").removesuffix("\n")


def apply_chat_template(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Wrap prompts the way the model was trained to be talked to.

    Args:
        tokenizer: The model's tokenizer.
        prompts: What the user says.

    Returns:
        Token ids, up to where the model's answer begins; ids stay as they are.

    Raises:
        KVPolicyError: The tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        msg = "this model's tokenizer has no chat template; leave --chat out."
        raise KVPolicyError(msg)
    return [_chat(tokenizer, p) if isinstance(p, str) else p for p in prompts]


def _chat(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return [int(token) for token in encoded["input_ids"]]


def _read(file: str, name: str) -> str:
    try:
        if file == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        msg = f"{name} cannot be read: {error.strerror}."
        raise KVPolicyError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{name} is not UTF-8 text (byte {error.start})."
        raise KVPolicyError(msg) from error


def _json_prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        msg = f"{where} is not JSON ({error}), though the file begins with '{{'."
        raise RequestError(msg) from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    msg = f'{where} has no "prompt" that is a text or a list of token ids.'
    raise RequestError(msg)
