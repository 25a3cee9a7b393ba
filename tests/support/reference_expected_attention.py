"""ExpectedAttention in plain loops, as its formulas read: un-rotate, mean, covariance, rotate."""

import math
from collections.abc import Sequence

from reference import Matrix, Vector, dot, softmax

THETA = 10_000.0


def rotated(vector: Vector, by: float) -> list[float]:
    """A query or key moved by some positions with the RoPE of Llama."""
    half = len(vector) // 2
    result = list(vector)
    for i in range(half):
        angle = by * THETA ** (-i / half)
        a, b = vector[i], vector[half + i]
        result[i] = a * math.cos(angle) - b * math.sin(angle)
        result[half + i] = b * math.cos(angle) + a * math.sin(angle)
    return result


def mean_rotation(vector: Vector, begin: int, n_future: int) -> list[float]:
    """The mean of a vector at several positions."""
    at = [rotated(vector, position) for position in range(begin, begin + n_future)]
    return [sum(column) / n_future for column in zip(*at, strict=True)]


def expected_attention(
    keys: Matrix,
    values: Matrix,
    queries: Sequence[Matrix],
    *,
    window_size: int = 128,
    n_future: int = 512,
    n_sink: int = 4,
    use_covariance: bool = True,
    use_vnorm: bool = True,
    epsilon: float = 0.0,
) -> list[float]:
    """Scores of the rows of one KV head after the sinks; row t is token t."""
    dim, seq_len = len(keys[0]), len(keys)
    per_head = []
    for head_queries in queries:
        first = max(n_sink, seq_len - window_size)
        plain = [rotated(head_queries[t], -t) for t in range(first, seq_len)]
        mean = [sum(column) / len(plain) for column in zip(*plain, strict=True)]
        off = [[a - m for a, m in zip(one, mean, strict=True)] for one in plain]
        covariance = [
            [sum(one[i] * one[j] for one in off) / len(plain) for j in range(dim)]
            for i in range(dim)
        ]
        # Columns of R C, transposed, and then those of R (R C)^T = R C R^T, as C is symmetric.
        for _ in range(2):
            columns = [list(column) for column in zip(*covariance, strict=True)]
            covariance = [mean_rotation(column, seq_len, n_future) for column in columns]
        moved = mean_rotation(mean, seq_len, n_future)
        logits = []
        for key in keys[n_sink:]:
            logit = dot(moved, key) / math.sqrt(dim)
            if use_covariance:
                logit += dot(key, [dot(row, key) for row in covariance]) / (2 * dim)
            logits.append(logit)
        per_head.append(softmax(logits))
    scores = [sum(column) / len(queries) for column in zip(*per_head, strict=True)]
    if use_vnorm:
        sizes = [math.sqrt(dot(value, value)) for value in values[n_sink:]]
        scores = [(score + epsilon) * size for score, size in zip(scores, sizes, strict=True)]
    return scores
