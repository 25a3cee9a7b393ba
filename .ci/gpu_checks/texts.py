"""Texts that are compared: their tokens, and the rows that are held on the way; without torch."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Positions of the rows that are held: for each layer and KV head.
Rows = Sequence[Sequence[Sequence[int]]]
Row = tuple[int, int]  # its head and position
Scored = tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]]  # positions and scores of heads

INF = float("inf")


@dataclass(frozen=True)
class Text:
    """A text as it was generated.

    Attributes:
        tokens: Its tokens, without the prompt.
        rows: The rows that were held when it had so many tokens.
    """

    tokens: Sequence[int]
    rows: Mapping[int, Rows]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with a checksum in place of rows."""
        return {
            "tokens": list(self.tokens),
            "rows": {num: checksum(rows) for num, rows in self.rows.items()},
        }


@dataclass(frozen=True)
class Parting:
    """Where a text parts from the expected one.

    Attributes:
        kind: ``"rows"``, ``"token"`` or ``"length"``.
        after: Tokens of the text by then.
        before: Tokens when rows were last seen to be equal.
    """

    kind: str
    after: int
    before: int = 0


def checksum(rows: Rows) -> int:
    """A number that differs where rows do."""
    return zlib.crc32(json.dumps([[list(head) for head in layer] for layer in rows]).encode())


def parting(expected: Mapping[str, Any], text: Text) -> Parting | None:
    """The first difference of a text from the one in a `Text.to_dict`; ``None``: there is none.

    Rows are compared where both were seen; those after ``n`` tokens come before token ``n``.
    """
    wanted = {int(num): value for num, value in expected["rows"].items()}
    first = _first_difference(expected["tokens"], text.tokens)
    before = 0
    for num in sorted(wanted.keys() & text.rows.keys()):
        if first is not None and first < num:
            break
        if wanted[num] != checksum(text.rows[num]):
            return Parting("rows", num, before)
        before = num
    if first is None:
        return None
    is_end = first >= min(len(expected["tokens"]), len(text.tokens))
    return Parting("length" if is_end else "token", first, before)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    pairs = zip(one, other, strict=False)
    differing = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if differing is None and len(one) != len(other):
        return min(len(one), len(other))
    return differing


def rows_gap(
    scores: Sequence[Sequence[float]],
    positions: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
) -> float:
    """How far apart the scores of disputed rows are, relative to the largest score.

    Rows are compared with those that they compete with, see `disputed`.

    Args:
        scores: Of each row of each head at the compaction; infinite for those that must stay.
        positions: Of the same rows.
        ours: Positions that we keep, of each head.
        theirs: Positions that the others keep.

    Returns:
        The gap; infinite if a disputed row has no score, or one that is infinite.
    """
    score_of = scores_by_row(positions, scores)
    largest = max((abs(value) for value in score_of.values() if abs(value) < INF), default=0.0)
    gaps = [spread([score_of.get(row, INF) for row in rows]) for rows in disputed(ours, theirs)]
    return max(gaps, default=0.0) / (largest or 1.0)


def disputed(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[list[Row]]:
    """Rows that one side keeps and the other does not, in groups that compete with each other.

    Where a head keeps equally many rows on both sides, its own compete, else those of all heads,
    which share a budget then.
    """
    found = [
        [(head, position) for position in sorted(set(a) ^ set(b))]
        for head, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]
    if any(len(set(a)) != len(set(b)) for a, b in zip(ours, theirs, strict=True)):
        found = [[row for rows in found for row in rows]]
    return [rows for rows in found if rows]


def scores_by_row(
    positions: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]
) -> dict[Row, float]:
    """The score of each row."""
    return {
        (head, position): score
        for head, (at, of_head) in enumerate(zip(positions, scores, strict=True))
        for position, score in zip(at, of_head, strict=True)
    }


def spread(values: Sequence[float]) -> float:
    """The distance of the largest value from the smallest; infinite if one of them is."""
    return INF if any(abs(value) == INF for value in values) else max(values) - min(values)


def share_gap(weights: Sequence[float], share: float, token: int) -> float:
    """By how much the share of a draw would have to move to give another token.

    Args:
        weights: Of each token, in the order of the vocabulary.
        share: The number that was drawn, from 0 to 1.
        token: The other token.
    """
    total = sum(weights)
    start = sum(weights[:token]) / total
    end = start + weights[token] / total
    return max(start - share, share - end, 0.0)


def deviation(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Mean difference of log-probabilities, each counted as 1 nat at most.

    Where precisions differ, now and then another row stays, and a token that needed it gets several
    nats less: without a most, the mean of thousands of tokens would be that of these few.
    """
    pairs = [
        pair
        for one, other in zip(found, expected, strict=True)
        for pair in zip(one, other, strict=True)
    ]
    return sum(min(abs(a - b), 1.0) for a, b in pairs) / len(pairs)
