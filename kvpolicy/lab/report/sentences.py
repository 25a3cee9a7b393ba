r"""Traces cut into sentences of a kind, for colouring.

A *thought* is what stands between two blank lines inside the thinking part, as `find_thoughts`
cuts them, and its kind is what a set of rules calls it. There a tokenizer says where they end;
here only the text is left, so that ``"\n\n"`` itself does.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from kvpolicy.entry_points import installed
from kvpolicy.lab.steer.rules import EXECUTION, GROUP, PUBLISHED, ThoughtRules
from kvpolicy.toolkit.paragraphs import PARAGRAPH, THINK_TAGS

PLAIN, TAG, ANSWER = "", "tag", "answer"

_OPENS, _CLOSES = THINK_TAGS
_TAGS = re.compile("|".join(map(re.escape, THINK_TAGS)))
_THOUGHT = re.compile(f".*?(?:{PARAGRAPH}\\s*|\\Z)", re.DOTALL)


class Piece(NamedTuple):
    """A part of a text, all of one kind.

    Attributes:
        kind: What the rules call a thought; ``"answer"`` outside the thinking part, ``"tag"``
            for what opens or closes it, ``""`` for white space alone.
        text: The part.
    """

    kind: str
    text: str


def cut(text: str, prompt: str, rules: ThoughtRules) -> list[Piece]:
    """Cut a generated text into thoughts, and tell what kinds they are.

    Args:
        text: What the model generated.
        prompt: What it was given: it may have opened the thinking part.
        rules: What kinds there are.

    Returns:
        Pieces whose texts make up ``text``, in order.
    """
    pieces: list[Piece] = []
    for part, is_thinking in _parts(text, prompt):
        if _TAGS.fullmatch(part):
            pieces.append(Piece(TAG, part))
        elif is_thinking:
            pieces += [_thought(found, rules) for found in _THOUGHT.findall(part) if found]
        else:
            pieces.append(Piece(ANSWER if part.strip() else PLAIN, part))
    return pieces


def kinds_of(rules: ThoughtRules) -> list[str]:
    """The kinds that thoughts can be of, ``"execution"`` first."""
    return list(dict.fromkeys([EXECUTION, *(rule.kind for rule in rules.rules)]))


def rules_for(*names: str) -> str:
    """Name of the rules for a task or a model: those of its own name if there are any.

    Args:
        names: Names as typed, the more telling first; options after a colon do not count.
    """
    known = installed(GROUP)
    plain = [name.partition(":")[0] for name in names]
    return next((name for name in plain if name in known), PUBLISHED)


def _thought(text: str, rules: ThoughtRules) -> Piece:
    return Piece(rules.kind_of(text) if text.strip() else PLAIN, text)


def _parts(text: str, prompt: str) -> Iterator[tuple[str, bool]]:
    """The text at its tags, each part with whether it is thinking."""
    is_thinking = _begins_thinking(text, prompt)
    for part in _split(text):
        yield part, is_thinking
        if part in THINK_TAGS:
            is_thinking = part == _OPENS


def _begins_thinking(text: str, prompt: str) -> bool:
    """What the last tag of the prompt says; without one, whatever the first tag ends."""
    before, after = _TAGS.findall(prompt), _TAGS.findall(text)
    if before:
        return before[-1] == _OPENS
    return not after or after[0] == _CLOSES


def _split(text: str) -> Iterator[str]:
    place = 0
    for tag in _TAGS.finditer(text):
        if tag.start() > place:
            yield text[place : tag.start()]
        yield tag[0]
        place = tag.end()
    if place < len(text):
        yield text[place:]
