"""Whether a text may part from the expected one: only where both sides were equal but for rounding.

A GPU adds in another order than a CPU, so that numbers differ by rounding, and where two tokens or
two rows are nearly equally good, another one wins. Whether that is so is decided by the numbers of
the CPU: the text is led along the expected tokens and rows there, and what the model and the
policies decide by is looked at where the texts part.

Scores may jump: R-KV counts keys as similar above a threshold. So rows whose scores are not near
may part, too, if noise as small as rounding, in the weights of the CPU's model, moves the scores of
these very rows as far, or has the CPU keep the rows that the GPU keeps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from decoding import Replay
from texts import (
    INF,
    Parting,
    Scored,
    Text,
    disputed,
    rows_gap,
    scores_by_row,
    share_gap,
    spread,
)

from kvpolicy import Sampling
from kvpolicy.attention.draw import columns_of, uniform, weights

# fp32 rounds to 6e-8. Logits are sums of hundreds of products, over a few layers, and over a
# hundred steps: what was seen is around 1e-5. Other defects than rounding take or leave rows and
# tokens at any distance, most of them a thousand times as far.
TOKEN_TOLERANCE = 1e-3  # nats between the logits of the two tokens
ROWS_TOLERANCE = 1e-6  # between the scores of disputed rows, relative to the largest
SHARE_TOLERANCE = 1e-4  # of the probability, between what was drawn and the other token


def gap_at(
    parting: Parting,
    expected: Mapping[str, Any],
    text: Text,
    replay: Replay,
    sampling: Sampling,
    prompt_len: int,
) -> tuple[float, float]:
    """How near both sides were where a text parts, and how near they may be.

    Nothing lies between them if the CPU of this machine, which has one text at a time, keeps the
    rows that the GPU kept. A text whose last token is missing or too many differs at a token, or in
    a way that has no excuse: then the gap is infinite.
    """
    if parting.kind == "rows":
        return _rows_gap(parting, text, replay), ROWS_TOLERANCE
    if parting.kind == "length":
        return INF, TOKEN_TOLERANCE
    ours, theirs = expected["tokens"][parting.after], text.tokens[parting.after]
    logits = replay.logits[parting.after]
    if sampling.greedy:
        return float(logits[ours] - logits[theirs]), TOKEN_TOLERANCE
    columns = columns_of([sampling], "cpu")
    assert columns.seed is not None, "the text is drawn"
    share = uniform(columns.seed, torch.tensor([prompt_len + parting.after]))
    likely = weights(logits[None], columns)[0].tolist()
    return share_gap(likely, float(share), theirs), SHARE_TOLERANCE


def noise_moves_as_much(
    parting: Parting, text: Text, replay: Replay, noisy: Sequence[Replay]
) -> bool:
    """Whether noise excuses rows that part.

    In every layer that differs, one of the noisy replays must hold the rows of the GPU, or noise
    must move the score of a disputed row by half of what lies between them at least.

    Args:
        parting: Where the text parts, by rows.
        text: The GPU's.
        replay: The text on the CPU.
        noisy: The same with noise in the weights.
    """
    both = zip(replay.rows[parting.after], text.rows[parting.after], strict=True)
    for layer, (ours, theirs) in enumerate(both):
        if ours == theirs or any(one.rows[parting.after][layer] == theirs for one in noisy):
            continue
        moved = [at for one in noisy for at in _compactions(parting, layer, one)]
        plain = _compactions(parting, layer, replay)
        if not any(_moves(at, moved, ours, theirs) for at in plain):
            return False
    return True


def _moves(
    plain: Scored,
    moved: Sequence[Scored],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
) -> bool:
    """Whether noise moves disputed rows as far as they are apart, at one compaction."""
    score_of = scores_by_row(*plain)
    same = [scores_by_row(*one) for one in moved if one[0] == plain[0]]
    for rows in disputed(ours, theirs):
        gap = spread([score_of.get(row, INF) for row in rows])
        moves = [abs(one[row] - score_of[row]) for one in same for row in rows if row in score_of]
        # Each of two rows may move towards the other.
        if not gap <= 2 * max(moves, default=0.0) < INF:
            return False
    return True


def _rows_gap(parting: Parting, text: Text, replay: Replay) -> float:
    """The largest gap of any layer whose rows differ."""
    if parting.after not in replay.rows:
        return INF
    gaps = []
    both = zip(replay.rows[parting.after], text.rows[parting.after], strict=True)
    for layer, (ours, theirs) in enumerate(both):
        if ours == theirs:
            continue
        # Several compactions of a prompt may lie between two looks at the rows.
        between = [
            rows_gap(scores, positions, ours, theirs)
            for positions, scores in _compactions(parting, layer, replay)
        ]
        gaps.append(min(between, default=INF))
    return max(gaps, default=0.0)


def _compactions(parting: Parting, layer: int, replay: Replay) -> list[Scored]:
    """Positions and scores at the compactions of a layer in which the text may have parted."""
    return [
        (positions, scores)
        for num, of_layer, positions, scores in replay.compactions
        if of_layer == layer and parting.before < num <= parting.after
    ]
