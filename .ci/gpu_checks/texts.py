"""Texts that are compared: their tokens, and the rows that are held on the way; without torch."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Positions of the rows that are held: for each layer and KV head.
Rows = Sequence[Sequence[Sequence[int]]]


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

    A row is disputed if one side keeps it and the other does not. Where a head keeps equally many
    rows on both sides, its own are compared, else those of all heads, which share a budget then.

    Args:
        scores: Of each row of each head at the compaction; infinite for those that must stay.
        positions: Of the same rows.
        ours: Positions that we keep, of each head.
        theirs: Positions that the others keep.

    Returns:
        The gap; infinite if a disputed row has no score, or one that is infinite.
    """
    score_of = [dict(zip(*pair, strict=True)) for pair in zip(positions, scores, strict=True)]
    finite = [abs(value) for head in score_of for value in head.values() if abs(value) < _INF]
    largest = max(finite, default=0.0) or 1.0
    disputed = [set(a) ^ set(b) for a, b in zip(ours, theirs, strict=True)]
    found = [
        [scored.get(position, _INF) for position in rows]
        for scored, rows in zip(score_of, disputed, strict=True)
    ]
    if any(len(set(a)) != len(set(b)) for a, b in zip(ours, theirs, strict=True)):
        found = [[value for head in found for value in head]]
    gaps = [_spread(head) for head in found if head]
    return max(gaps, default=0.0) / largest


_INF = float("inf")


def _spread(values: Sequence[float]) -> float:
    return _INF if any(abs(value) == _INF for value in values) else max(values) - min(values)


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
