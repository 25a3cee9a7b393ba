"""Whether a text may part from the expected one: only where both sides were nearly equal.

A GPU adds in another order than a CPU, so that numbers differ by rounding, and where two tokens or
two rows are nearly equally good, another one wins. Whether that is so is decided by the numbers of
the CPU: the text is led along the expected tokens there, and what the model and the policies decide
by is looked at where the texts part.
"""

from collections.abc import Mapping
from typing import Any

import torch
from decoding import Replay
from texts import Parting, Text, rows_gap, share_gap

from kvpolicy import Sampling
from kvpolicy.attention.draw import columns_of, uniform, weights

# fp32 rounds to 6e-8. Logits and scores are sums of hundreds of products, over a few layers, and
# over a hundred steps where they accumulate: what was seen is around 1e-5. Other defects than
# rounding take or leave rows and tokens at any distance, most of them a thousand times as far.
TOKEN_TOLERANCE = 1e-3  # nats between the logits of the two tokens
ROWS_TOLERANCE = 1e-4  # between the scores of disputed rows, relative to the largest
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

    A text whose last token is missing or too many differs at a token, or in a way that has no
    excuse: then the gap is infinite.
    """
    if parting.kind == "rows":
        return _rows_gap(parting, text, replay), ROWS_TOLERANCE
    if parting.kind == "length":
        return float("inf"), TOKEN_TOLERANCE
    ours, theirs = expected["tokens"][parting.after], text.tokens[parting.after]
    logits = replay.logits[parting.after]
    if sampling.greedy:
        return float(logits[ours] - logits[theirs]), TOKEN_TOLERANCE
    columns = columns_of([sampling], "cpu")
    assert columns.seed is not None, "the text is drawn"
    share = uniform(columns.seed, torch.tensor([prompt_len + parting.after]))
    likely = weights(logits[None], columns)[0].tolist()
    return share_gap(likely, float(share), theirs), SHARE_TOLERANCE


def _rows_gap(parting: Parting, text: Text, replay: Replay) -> float:
    """The largest gap of any layer whose rows differ."""
    gaps = []
    both = zip(replay.rows[parting.after], text.rows[parting.after], strict=True)
    for layer, (ours, theirs) in enumerate(both):
        if ours == theirs:
            continue
        # Several compactions of a prompt may lie between two looks at the rows.
        between = [
            rows_gap(scores, positions, ours, theirs)
            for num, of_layer, positions, scores in replay.compactions
            if of_layer == layer and parting.before < num <= parting.after
        ]
        gaps.append(min(between, default=float("inf")))
    return max(gaps, default=float("inf"))
