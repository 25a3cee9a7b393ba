"""OBCache in plain loops: what happens to outputs if rows lose their value or key.

Nothing here imports kvpolicy. An oracle takes one KV head of one sequence, like those of
`reference.py`; all arithmetic is in double precision.
"""

import math
from collections.abc import Sequence

from reference import Matrix, Vector, dot, pool, softmax


def attend(query: Vector, keys: Matrix, values: Matrix) -> tuple[list[float], list[float], Vector]:
    """Logits, weights and output of one query over all rows given."""
    logits = [dot(query, key) / math.sqrt(len(query)) for key in keys]
    weights = softmax(logits)
    output = [
        math.fsum(a * v[i] for a, v in zip(weights, values, strict=True))
        for i in range(len(values[0]))
    ]
    return logits, weights, output


def of_query(kind: str, query: Vector, keys: Matrix, values: Matrix) -> list[float]:
    """What each row adds to its saliency for one query that sees all rows."""
    logits, weights, output = attend(query, keys, values)
    found = []
    for z, a, v in zip(logits, weights, values, strict=True):
        apart = [x - o for x, o in zip(v, output, strict=True)]
        by_value = a**2 * dot(v, v)
        by_key = (a * z) ** 2 * dot(apart, apart)
        both = [x + z * d for x, d in zip(v, apart, strict=True)]
        found.append(
            {
                "attention": a,
                "v_p1": a * math.fsum(abs(x) for x in v),
                "v": by_value,
                "k": by_key,
                "vk_no_cross": by_value + by_key,
                "vk": a**2 * dot(both, both),  # the square of a sum, without a cross term
            }[kind]
        )
    return found


def without_value(query: Vector, keys: Matrix, values: Matrix, row: int) -> float:
    """Square of the change of an output if the value of a row becomes 0."""
    emptied = [[0.0] * len(v) if t == row else v for t, v in enumerate(values)]
    return squared_change(attend(query, keys, values)[2], attend(query, keys, emptied)[2])


def less(query: Vector, keys: Matrix, values: Matrix, row: int, by: float, *, of: str) -> float:
    """Square of the change of an output, per ``by``, if a row's key, or both, shrink by a share."""

    def shrunk(rows: Matrix) -> Matrix:
        return [[x * (1 - by) for x in v] if t == row else v for t, v in enumerate(rows)]

    changed = attend(query, shrunk(keys), shrunk(values) if "v" in of else values)[2]
    return squared_change(attend(query, keys, values)[2], changed) / by**2


def squared_change(before: Vector, after: Vector) -> float:
    return math.fsum((a - b) ** 2 for a, b in zip(before, after, strict=True))


class Accumulated:
    """Saliency of resident rows by position, summed over queries as they come."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.resident: list[int] = []
        self.sums: dict[int, float] = {}

    def feed(
        self,
        keys: Matrix,
        values: Matrix,
        queries: Sequence[Matrix],
        span: range,
        counted: range,
    ) -> None:
        """Tokens enter one by one; the queries of ``counted`` count. ``queries``: ``[G][T][D]``."""
        for token in span:
            self.resident.append(token)
            self.sums[token] = 0.0
            if token not in counted:
                continue
            rows = [keys[t] for t in self.resident], [values[t] for t in self.resident]
            for head in queries:
                for t, gain in zip(
                    self.resident, of_query(self.kind, head[token], *rows), strict=True
                ):
                    self.sums[t] += gain

    def candidates(self, n_recent: int, kernel_size: int, pooling: str) -> list[float]:
        """Pooled sums of all rows but the recent ones."""
        older = self.resident[: len(self.resident) - n_recent]
        return pool([self.sums[t] for t in older], kernel_size, pooling)

    def keep(self, positions: Sequence[int]) -> None:
        self.resident = list(positions)


def window(
    kind: str,
    keys: Matrix,
    values: Matrix,
    queries: Sequence[Matrix],
    *,
    window_size: int,
    group_reduce: str,
) -> list[float]:
    """Saliency of all rows for the last queries, which see the rows up to their own."""
    num_rows = len(keys)
    by_head = []
    for head in queries:
        sums = [0.0] * num_rows
        for age in range(1, min(window_size, num_rows) + 1):
            seen = num_rows - age + 1
            for t, gain in enumerate(of_query(kind, head[-age], keys[:seen], values[:seen])):
                sums[t] += gain
        by_head.append(sums)
    reduce = {"sum": math.fsum, "max": max, "mean": lambda xs: math.fsum(xs) / len(xs)}
    return [reduce[group_reduce](column) for column in zip(*by_head, strict=True)]
