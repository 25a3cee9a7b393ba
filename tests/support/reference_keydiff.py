"""KeyDiff in plain loops; see `reference` for what an oracle may share with the sources."""

import math
from collections.abc import Sequence

from reference import dot


def keydiff(keys: Sequence[Sequence[float]]) -> list[float]:
    """The score of each key of one head: minus its cosine with the mean of the unit keys."""
    anchor = [0.0] * len(keys[0])
    for key in keys:
        length = math.sqrt(dot(key, key))
        for i, x in enumerate(key):
            anchor[i] += x / length / len(keys)
    size = math.sqrt(dot(anchor, anchor))
    return [-dot(key, anchor) / (math.sqrt(dot(key, key)) * size) for key in keys]
