"""Oracles of operations over slabs, in plain loops over Python floats; imports nothing of kvpolicy.

Slabs are nested lists: ``keys[slot][head][row]`` is a list of ``D`` numbers.
"""

import math
from operator import mul


def attention(query, keys, values, seen, scaling, softcap=None, sink=None):
    """Output of one query over the rows seen; of every row its weight and what the softmax reads.

    A row that is not seen has the weight 0 and the logit ``None``.
    """
    logits = []
    for row, key in enumerate(keys):
        x = sum(a * b for a, b in zip(query, key, strict=True)) * scaling if seen[row] else None
        logits.append(softcap * math.tanh(x / softcap) if seen[row] and softcap else x)
    visible = [x for x in logits if x is not None]
    if not visible:
        return [0.0] * len(values[0]), [0.0] * len(keys), logits
    top = max(visible if sink is None else [*visible, sink])
    total = sum(math.exp(x - top) for x in visible)
    total += 0.0 if sink is None else math.exp(sink - top)
    weights = [0.0 if x is None else math.exp(x - top) / total for x in logits]
    rows = range(len(keys))
    dims = range(len(values[0]))
    output = [sum(weights[r] * values[r][d] for r in rows if seen[r]) for d in dims]
    return output, weights, logits


def accumulated(name, before, weights, logits):
    """What one row has accumulated after one more query, from its weights and logits by head."""
    parts = [(a, 0.0 if z is None else z) for a, z in zip(weights, logits, strict=True)]
    received = {
        "attn_sums": lambda a, _: a,
        "attn_squares": lambda a, _: a**2,
        "attn_squares_logit": lambda a, z: a**2 * z,
        "attn_squares_logit2": lambda a, z: (a * z) ** 2,
    }[name]
    return before + sum(received(*part) for part in parts)


def drop_first(rows, empty):
    """The rows of a full slab without the first one, and an empty row behind them."""
    return [*rows[1:], empty]


def redundancy(keys, threshold, retain):
    """Mean cosine similarity of each row to the others, less exempt pairs, after a softmax."""
    num = len(keys)
    lengths = [math.sqrt(sum(x * x for x in key)) + 1e-8 for key in keys]
    units = [[x / length for x in key] for key, length in zip(keys, lengths, strict=True)]
    similarity = [
        [0.0 if i == j else sum(map(mul, u, v)) for j, v in enumerate(units)]
        for i, u in enumerate(units)
    ]
    closest = min(abs(x - threshold) for line in similarity for x in line)
    for line in similarity:
        similar = [j for j, x in enumerate(line) if x > threshold]
        line[similar[-1] if similar and retain == "last" else 0] = 0.0
    means = [sum(similarity[i][j] for i in range(num)) / num for j in range(num)]
    weights = [math.exp(mean) for mean in means]
    return [weight / sum(weights) for weight in weights], closest
