"""A trace as it is written: pieces of text, each with the weight of its tokens in the loss."""

import re
from collections.abc import Iterable, Sequence

import attrs

# What no model can predict: which sentence comes next, which opener, which wording.
DRAWN = 0.25
# What it should not learn to say: numbers that are wrong on purpose.
WRONG = 0.0


@attrs.frozen
class Piece:
    """Text between two token borders.

    Attributes:
        text: The text.
        weight: Weight of the loss of each of its tokens.
    """

    text: str
    weight: float = 1.0


def marked(text: str) -> list[Piece]:
    """Split a text at its drawn words.

    Args:
        text: The text, with ``~`` before every word that is drawn: ``"~Wait, let me~ verify:"``.

    Returns:
        The pieces, without the marks.
    """
    parts = re.split(r"~( ?[A-Za-z]+)", text)  # plain and drawn parts take turns
    weights = (DRAWN if number % 2 else 1.0 for number in range(len(parts)))
    return [Piece(part, weight) for part, weight in zip(parts, weights, strict=True) if part]


def join(pieces: Iterable[Piece]) -> str:
    """Put the text together.

    Args:
        pieces: The pieces in order.

    Returns:
        The whole text.
    """
    return "".join(piece.text for piece in pieces)


def weigh_tokens(pieces: Sequence[Piece], starts: Sequence[int]) -> list[float]:
    """Lay the weights of the pieces out on tokens of the whole text.

    Args:
        pieces: The pieces in order.
        starts: Where each token of the whole text starts; every piece starts at one of them.

    Returns:
        A weight for each token.
    """
    of_piece: dict[int, float] = {}
    position = 0
    for piece in pieces:
        of_piece[position] = piece.weight
        position += len(piece.text)
    weights: list[float] = []
    for start in starts:
        weights.append(of_piece.pop(start) if start in of_piece else weights[-1])
    assert not of_piece, "a piece starts inside a token"
    return weights
