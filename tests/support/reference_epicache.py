"""EpiCache's block step in plain loops, in double precision; shares nothing with the source."""

import math


def scores(keys: list[list[float]], queries: list[list[list[float]]]) -> list[float]:
    """Scores of the rows of one KV head.

    ``keys`` are its retained rows, ``queries[g][t]`` those of patched token t in query head g.
    """
    best = [0.0] * len(keys)
    for of_head in queries:
        for query in of_head:
            logits = [
                sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(key))
                for key in keys
            ]
            top = max(logits)
            exps = [math.exp(logit - top) for logit in logits]
            total = sum(exps)
            for row, value in enumerate(exps):
                best[row] = max(best[row], value / total)
    return best


def keep_pair(of_heads: list[list[float]], budget: int) -> list[list[int]]:
    """Rows kept of each head if all share ``budget * heads``: the best, one of each at least."""
    must = [max(range(len(one)), key=lambda row: (one[row], -row)) for one in of_heads]
    ranked = sorted(
        (
            (row != must[head], -score, head, row)
            for head, one in enumerate(of_heads)
            for row, score in enumerate(one)
        ),
    )
    chosen = ranked[: budget * len(of_heads)]
    return [sorted(row for _, _, h, row in chosen if h == head) for head in range(len(of_heads))]


def keep_uniform(of_head: list[float], budget: int) -> list[int]:
    """Rows kept of one head: the best, of equal ones the newer."""
    ranked = sorted(range(len(of_head)), key=lambda row: (-of_head[row], -row))
    return sorted(ranked[:budget])
