"""The texts of samples in blocks: all cells' answers to one item stand together.

They are read side by side, and they resemble each other, which compresses well.
"""

from typing import Any

import attrs

from kvpolicy.lab.report.gather import GroupView
from kvpolicy.lab.report.packing import shorten
from kvpolicy.lab.report.sentences import PLAIN, Piece, cut
from kvpolicy.lab.steer.rules import ThoughtRules

_BLOCK = 1 << 19  # characters: opened in a few milliseconds


@attrs.frozen
class Place:
    """Where the texts of some items begin.

    Attributes:
        first: Place of the first of them among the group's items.
        end: Place behind the last.
    """

    first: int
    end: int


def places_of(view: GroupView) -> list[Place]:
    """Share the items of a group out among blocks of about the same size."""
    if view.is_pooled:
        return []  # its seeds have them
    found, first, size = [], 0, 0
    for place, number in enumerate(view.numbers):
        size += sum(map(len, _texts_of(view, number)))
        if size >= _BLOCK or place == len(view.numbers) - 1:
            found.append(Place(first, place + 1))
            first, size = place + 1, 0
    return found


def block(view: GroupView, place: Place, rules: ThoughtRules, cap: int | None) -> list[Any]:
    """The texts of some items.

    Args:
        view: The group.
        place: Which items.
        rules: What thoughts are called by.
        cap: Characters that a text may keep.

    Returns:
        For each item ``{"prompt", "answer", "reference", "cells": {CELL: {ATTEMPT: {...}}}}``.
    """
    numbers = view.numbers[place.first : place.end]
    return [_item(view, number, rules, cap) for number in numbers]


def lengths(view: GroupView) -> list[int]:
    """Characters of every text in the blocks of a group."""
    return [len(text) for number in view.numbers for text in _texts_of(view, number)]


def _texts_of(view: GroupView, number: int) -> list[str]:
    """What there is to read of an item: what is asked, and what came of it."""
    item = view.items.get(number)
    asked = [item.prompt, item.answer, item.reference or ""] if item else []
    return asked + [one.text for cell in view.cells for one in cell.by_item.get(number, [])]


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
