"""Texts packed for a page: compressed in blocks that a browser opens one by one."""

import base64
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from kvpolicy.lab.report.encoding import to_json
from kvpolicy.lab.report.sentences import Piece

CUT = "cut"
AROUND = 80  # bytes that a block takes beside its own: its element, and where it is named

# What one text may keep if all of them together are too long for the page.
_DENSEST = 24  # characters in a byte of a block: no prose is as dense
_CAPS = (None, *(2**power for power in range(17, 8, -1)))


@attrs.frozen
class Packed:
    """Blocks of texts.

    Attributes:
        blocks: Each a value as JSON, compressed by zlib, in base64.
        cap: Characters that are left of a longer text; ``None`` if all are whole.
    """

    blocks: list[str]
    cap: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes that the blocks take in a page, or a few more."""
        return sum(len(block) + AROUND for block in self.blocks)


def pack(value: Any) -> str:
    """One value as a block; letters of any kind, broken ones too, come back as they are."""
    return base64.b64encode(zlib.compress(to_json(value).encode("ascii"))).decode("ascii")


def pack_within(
    blocks: Callable[[int | None], Sequence[Any]], lengths: Sequence[int], most_bytes: int
) -> Packed:
    """Pack blocks so that they fit, at the cost of the middles of the longest texts.

    Args:
        blocks: Makes the values from the characters a text may keep, ``None`` for all.
        lengths: Characters of the texts in them.
        most_bytes: What they may take.

    Returns:
        The blocks with the largest cap that fits, or with the smallest there is.
    """
    for cap in _CAPS:
        num_chars = sum(length if cap is None else min(length, cap) for length in lengths)
        if num_chars > _DENSEST * most_bytes and cap != _CAPS[-1]:
            continue  # hopeless, and long texts take long to cut and to compress
        packed = Packed([pack(block) for block in blocks(cap)], cap)
        if packed.num_bytes <= most_bytes:
            break
    return packed


def shorten(pieces: Sequence[Piece], cap: int | None) -> list[Piece]:
    """Leave out the middle of a long text, and say so there.

    Args:
        pieces: The text.
        cap: Characters that may stay; ``None`` for all.

    Returns:
        Pieces of at most ``cap`` characters, two thirds of them from the beginning, with one of
        kind ``"cut"`` between them that tells how many are missing; or what was given.
    """
    length = sum(len(piece.text) for piece in pieces)
    if cap is None or length <= cap:
        return list(pieces)
    tail = cap // 3
    head = _first(pieces, cap - tail)
    end = [Piece(kind, text[::-1]) for kind, text in pieces]
    last = [Piece(kind, text[::-1]) for kind, text in _first(end[::-1], tail)]
    return [*head, Piece(CUT, f"{length - cap:,}"), *last[::-1]]


def _first(pieces: Sequence[Piece], num_chars: int) -> list[Piece]:
    found = []
    for kind, text in pieces:
        if num_chars <= 0:
            break
        found.append(Piece(kind, text[:num_chars]))
        num_chars -= len(text)
    return found
