r"""Texts of samples in a page: cut into thoughts of a kind for colouring, shortened, packed.

All cells' answers to one item are in one block: they are read side by side, and they resemble
each other, which compresses well.

A *thought* is the text between two blank lines within the thinking part, as in `find_thoughts`;
rules assign its kind. `find_thoughts` reads tokens; here only the text is left, so ``"\n\n"``
itself ends a thought.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs

from kvpolicy.lab.report.encoding import BLOCK_OVERHEAD, pack
from kvpolicy.lab.report.gather import GroupView
from kvpolicy.lab.steer.thoughts import EXECUTION, ThoughtRules
from kvpolicy.toolkit.paragraphs import PARAGRAPH, THINK_TAGS

PLAIN, TAG, ANSWER, GAP = "", "tag", "answer", "cut"

_OPENS, _CLOSES = THINK_TAGS
_TAGS = re.compile(f"({'|'.join(map(re.escape, THINK_TAGS))})")
_THOUGHT = re.compile(f".*?(?:{PARAGRAPH}\\s*|\\Z)", re.DOTALL)

_BLOCK_CHARS = 1 << 19  # opened in a few milliseconds
_MAX_DENSITY = 24  # characters per byte of a block: no prose compresses better
# Lengths to which texts are shortened if all of them are too long for the page.
_CAPS = (None, *(2**power for power in range(17, 8, -1)))


class Piece(NamedTuple):
    """A part of a text with one kind.

    Attributes:
        kind: Kind of the thought by the rules; ``"answer"`` outside the thinking part, ``"tag"``
            for its opening or closing tag, ``""`` for white space, ``"cut"`` for a gap.
        text: The part.
    """

    kind: str
    text: str


@attrs.frozen
class Packed:
    """Blocks of texts.

    Attributes:
        blocks: The blocks, as made by `pack`.
        cap: The most characters of a text; ``None`` if all texts are whole.
    """

    blocks: list[str]
    cap: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes that the blocks take in a page, rounded up."""
        return sum(len(block) + BLOCK_OVERHEAD for block in self.blocks)


def item_ranges(view: GroupView) -> list[range]:
    """Divide the items of a group, by index, into blocks of about equal size."""
    if view.is_pooled:
        return []  # the groups of its seeds have them
    found, first, size = [], 0, 0
    for index, number in enumerate(view.numbers):
        size += sum(map(len, _texts_of(view, number)))
        if size >= _BLOCK_CHARS or index == len(view.numbers) - 1:
            found.append(range(first, index + 1))
            first, size = index + 1, 0
    return found


def text_block(view: GroupView, items: range, rules: ThoughtRules, cap: int | None) -> list[Any]:
    """Texts of some items.

    Args:
        view: The group.
        items: The items, by index.
        rules: Rules that classify thoughts.
        cap: The most characters of a text.

    Returns:
        For each item ``{"prompt", "answer", "reference", "cells": {CELL: {ATTEMPT: {...}}}}``.
    """
    return [_item(view, view.numbers[index], rules, cap) for index in items]


def text_lengths(view: GroupView) -> list[int]:
    """Number of characters of every text in the blocks of a group."""
    return [len(text) for number in view.numbers for text in _texts_of(view, number)]


def cut(text: str, prompt: str, rules: ThoughtRules) -> list[Piece]:
    """Cut a generated text into thoughts with their kinds.

    Args:
        text: The generated text.
        prompt: The prompt, which may have opened the thinking part.
        rules: Rules that classify thoughts.

    Returns:
        Pieces whose texts together are ``text``, in order.
    """
    pieces: list[Piece] = []
    for part, is_thinking in _parts(text, prompt):
        if part in THINK_TAGS:
            pieces.append(Piece(TAG, part))
        elif is_thinking:
            pieces += [_thought(found, rules) for found in _THOUGHT.findall(part) if found]
        else:
            pieces.append(Piece(ANSWER if part.strip() else PLAIN, part))
    return pieces


def kinds_of(rules: ThoughtRules) -> list[str]:
    """Kinds of thoughts, ``"execution"`` first."""
    return list(dict.fromkeys([EXECUTION, *(rule.kind for rule in rules.rules)]))


def pack_within(
    blocks: Callable[[int | None], Sequence[Any]], lengths: Sequence[int], max_bytes: int
) -> Packed:
    """Pack blocks so that they fit; if necessary, without the middles of the longest texts.

    Args:
        blocks: Makes the values for a maximum of characters per text, ``None`` for no maximum.
        lengths: Characters of the texts in them.
        max_bytes: The most bytes they may take.

    Returns:
        The blocks with the largest maximum that fits, or with the smallest one.
    """
    for cap in _CAPS:
        num_chars = sum(length if cap is None else min(length, cap) for length in lengths)
        if num_chars > _MAX_DENSITY * max_bytes and cap != _CAPS[-1]:
            continue  # cannot fit, and long texts take long to compress
        packed = Packed([pack(block) for block in blocks(cap)], cap)
        if packed.num_bytes <= max_bytes:
            break
    return packed


def shorten(pieces: Sequence[Piece], cap: int | None) -> list[Piece]:
    """Leave out the middle of a long text.

    Args:
        pieces: The text.
        cap: The most characters to keep; ``None`` for all.

    Returns:
        Pieces of at most ``cap`` characters, two thirds of them from the beginning, with a piece
        of kind ``"cut"`` in the gap that holds the number of missing characters.
    """
    length = sum(len(piece.text) for piece in pieces)
    if cap is None or length <= cap:
        return list(pieces)
    tail = cap // 3
    head = _leading_chars(pieces, cap - tail)
    end = [Piece(kind, text[::-1]) for kind, text in pieces]
    last = [Piece(kind, text[::-1]) for kind, text in _leading_chars(end[::-1], tail)]
    return [*head, Piece(GAP, f"{length - cap:,}"), *last[::-1]]


def _texts_of(view: GroupView, number: int) -> list[str]:
    """Prompt, answer and reference of an item, and the texts of all cells."""
    item = view.items.get(number)
    given = [item.prompt, item.answer, item.reference or ""] if item else []
    return given + [one.text for cell in view.cells for one in cell.by_item.get(number, [])]


def _item(view: GroupView, number: int, rules: ThoughtRules, cap: int | None) -> dict[str, Any]:
    item = view.items.get(number)
    prompt = item.prompt if item else ""
    reference = item.reference if item else None
    return {
        "prompt": shorten([Piece(PLAIN, prompt)], cap),
        "answer": item.answer if item else "",
        "reference": shorten([Piece(PLAIN, reference)], cap) if reference else None,
        "cells": {
            str(i): {
                str(sample.attempt): {
                    "pieces": shorten(cut(sample.text, prompt, rules), cap),
                    "error": sample.error,
                    "ungraded": sample.ungraded,
                    "values": sample.values,
                }
                for sample in cell.by_item.get(number, [])
            }
            for i, cell in enumerate(view.cells)
        },
    }


def _thought(text: str, rules: ThoughtRules) -> Piece:
    return Piece(rules.kind_of(text) if text.strip() else PLAIN, text)


def _parts(text: str, prompt: str) -> Iterator[tuple[str, bool]]:
    """The text split at its tags, each part with whether it is thinking."""
    is_thinking = _begins_thinking(text, prompt)
    for part in filter(None, _TAGS.split(text)):
        yield part, is_thinking
        if part in THINK_TAGS:
            is_thinking = part == _OPENS


def _begins_thinking(text: str, prompt: str) -> bool:
    """By the last tag of the prompt; without one, by the first tag of the text."""
    before, after = _TAGS.findall(prompt), _TAGS.findall(text)
    if before:
        return before[-1] == _OPENS
    return not after or after[0] == _CLOSES


def _leading_chars(pieces: Sequence[Piece], num_chars: int) -> list[Piece]:
    found = []
    for kind, text in pieces:
        if num_chars <= 0:
            break
        found.append(Piece(kind, text[:num_chars]))
        num_chars -= len(text)
    return found
