"""Prompts of the command line, read from files.

A file has one prompt per line, or JSON lines: ``{"id": "a", "prompt": "..."}``, where the prompt
is a text or token ids, or ``{"id": 7, "messages": [{"role": "user", "content": "..."}]}``. A JSON
line may have limits and sampling of its own, which replace those of the command line.
"""

import hashlib
import os
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self

import attrs

from kvpolicy.cli.output import info
from kvpolicy.entry_points import nearest
from kvpolicy.errors import KVPolicyError, RequestError
from kvpolicy.files import MAX_BYTES, Line, decode, open_binary, parse_json, text_lines
from kvpolicy.prompts import LIMITS, SAMPLING, Prompt

_KEYS = tuple(sorted(("id", "messages", "prompt", *LIMITS, *SAMPLING)))
_MESSAGE_KEYS = ("content", "role")
_MOST_KEYS = 9  # that a message lists


class PromptFile(Sequence[Prompt]):
    """The prompts of a file, checked when it is opened and read from it when they are needed.

    It holds 16 bytes of each prompt. Closed at the end of the block.

    Attributes:
        name: What it is, for messages.
        digest: Hash of its content, 16 hexadecimal digits.
    """

    def __init__(self, file: str) -> None:
        """Open a file and check every line.

        Args:
            file: Its path.

        Raises:
            KVPolicyError: As for `read_prompts`, or it is standard input or no regular file, which
                cannot be read again.
        """
        path = Path(file)
        self.name = f"'{file}'"
        if file == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            self.name = "standard input" if file == "-" else self.name
            msg = (
                f"{self.name} cannot be read a second time, to continue after an interruption; "
                "write the prompts into a file, or leave out --output."
            )
            raise KVPolicyError(msg)
        self._begins, self._numbers = array("q"), array("q")
        with ExitStack() as undo:
            self._file = undo.enter_context(open_binary(path, self.name))
            self._state = self._found()
            self.digest = self._check()
            self._undo = undo.pop_all()

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        begin = self._file.seek(self._begins[index])
        line = next(text_lines(self._file, self.name, begin=begin), None)
        if line is None or self._found() != self._state:
            msg = (
                f"{self.name} was changed while its prompts were answered; the answers so far are "
                "kept: put the old content back, or give --overwrite to begin again."
            )
            raise KVPolicyError(msg)
        return self._parser.prompt(index, attrs.evolve(line, number=self._numbers[index]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _found(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _check(self) -> str:
        """Read all lines; return the hash of the content."""
        digest = hashlib.sha256()
        lines = text_lines(self._file, self.name, on_bytes=digest.update)
        self._parser, ids = _Parser(self.name), _Ids()
        for index, line in enumerate(lines):
            ids.add(self._parser.prompt(index, line))
            self._begins.append(line.begin)
            self._numbers.append(line.number)
        self._parser.finish(len(self))
        ids.check(self.__getitem__)
        return digest.hexdigest()[:16]


def read_prompts(file: str) -> list[Prompt]:
    """Read prompts from a file, or standard input if it is ``-``, one per line.

    A file whose first line begins with ``{`` holds JSON lines. Empty lines are skipped.

    Args:
        file: Path of the file.

    Raises:
        KVPolicyError: The file cannot be read, has no prompt, a line is malformed, or two have the
            same id.
    """
    if file == "-":
        return _read_all(sys.stdin.buffer, "standard input")
    with open_binary(Path(file), f"'{file}'") as opened:
        return _read_all(opened, f"'{file}'")


def _read_all(file: BinaryIO, name: str) -> list[Prompt]:
    parser, ids = _Parser(name), _Ids()
    prompts: list[Prompt] = []
    for line in text_lines(file, name):
        if line.begin > MAX_BYTES:
            msg = f"{name} cannot be read: it is larger than {MAX_BYTES >> 20} MiB; give --output."
            raise KVPolicyError(msg)
        prompts.append(parser.prompt(len(prompts), line))
        ids.add(prompts[-1])
    parser.finish(len(prompts))
    ids.check(prompts.__getitem__)
    return prompts


class _Parser:
    """Makes the lines of one file prompts: texts, or JSON if the first one begins with a brace."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_json: bool | None = None
        self._ignored: dict[str, None] = {}

    def prompt(self, index: int, line: Line) -> Prompt:
        """The prompt of a line; the first line comes first."""
        if self._is_json is None:
            self._is_json = line.text.lstrip().startswith("{")
        place = f"line {line.number} of {self._name}"
        if not self._is_json:
            return Prompt(index, line.text, place=place)
        record = _record(line.text, place)
        prompt = _prompt(record, index, place)
        if len(self._ignored) < _MOST_KEYS:
            self._ignored |= dict.fromkeys(key for key in record if key not in _KEYS)
        return prompt

    def finish(self, num_prompts: int) -> None:
        """Refuse a file without prompts; name the keys that are not used."""
        if not num_prompts:
            msg = f"{self._name} has no prompt; write one per line."
            raise KVPolicyError(msg)
        if self._ignored:
            keys = ", ".join(repr(key) for key in [*self._ignored][:_MOST_KEYS])
            info(f"{self._name} has keys that are not used: {keys}; used are {', '.join(_KEYS)}.")


class _Ids:
    """Finds ids that read alike, whose results could not be told apart; 8 bytes for each."""

    def __init__(self) -> None:
        self._digests = array("Q")

    def add(self, prompt: Prompt) -> None:
        """Note the id of the next prompt."""
        text = str(prompt.id).encode(errors="surrogatepass")
        digest = hashlib.blake2b(text, digest_size=8).digest()
        self._digests.append(int.from_bytes(digest))

    def check(self, prompt_at: Callable[[int], Prompt]) -> None:
        """Refuse two equal ids.

        Args:
            prompt_at: The prompt with a number.
        """
        import numpy as np

        digests = np.frombuffer(self._digests, np.uint64)
        found, counts = np.unique(digests, return_counts=True)
        # Different ids may have equal digests, very rarely.
        first: dict[str, Prompt] = {}
        for index in np.flatnonzero(np.isin(digests, found[counts > 1])):
            prompt = prompt_at(int(index))
            other = first.setdefault(str(prompt.id), prompt)
            if other is not prompt:
                msg = (
                    f"{other.place} and {prompt.place.partition(' of ')[0]} have the id "
                    f"{prompt.id!r:.60}; give each prompt its own (a line without one has its "
                    "number, counted from 0)."
                )
                raise RequestError(msg)


def read_standard_input() -> str:
    """All of standard input, as text.

    Raises:
        KVPolicyError: It is not UTF-8.
    """
    return decode(sys.stdin.buffer.read(), "standard input")


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
    own = _own(record, place)
    if given == ["messages"]:
        return Prompt(key, [], _messages(record["messages"], place), own, place)
    prompt = record["prompt"]
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not is_ids and not isinstance(prompt, str):
        msg = f'{place} has no "prompt" that is a text or a list of token ids, but {prompt!r:.60}.'
        raise RequestError(msg)
    return Prompt(key, prompt, own=own, place=place)


def _own(record: Mapping[str, Any], place: str) -> dict[str, Any]:
    own = {key: record[key] for key in (*LIMITS, *SAMPLING) if record.get(key) is not None}
    if own:
        from kvpolicy.engine.requests.request import Request

        try:
            Prompt(0, "", own=own).request(Request())
        except KVPolicyError as error:
            msg = f"{place}: {error}."
            raise RequestError(msg) from error
    return own


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
