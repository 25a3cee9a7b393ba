"""LazyEviction in plain loops, step by step; see `reference` for what an oracle may share."""

import math
from collections.abc import Callable, Sequence

from reference import attention


class LazyHead:
    """One KV head: the rows it holds, their last uses, and their longest gaps between uses.

    Attributes:
        closest: How close any weight came to ``alpha``.
    """

    def __init__(self, keys: Sequence, queries: Sequence, alpha: float) -> None:
        self.keys, self.queries, self.alpha = keys, queries, alpha
        self.last: dict[int, int] = {}
        self.longest: dict[int, int] = {}
        self.closest = math.inf

    def follow(self, count: int, is_read: Callable[[int], bool]) -> None:
        """Add tokens up to ``count``, and read the uses of the queries that are read."""
        start = max(self.last, default=-1) + 1
        for step in range(start, count):
            self.last[step], self.longest[step] = step - 1, 0
            rows = list(self.last)
            if not is_read(step):
                for row in range(start, step + 1):  # as if used at a step that is not read
                    self.last[row] = step
                continue
            of_heads = [attention(q[step], [self.keys[row] for row in rows]) for q in self.queries]
            for row, *weights in zip(rows, *of_heads, strict=True):
                self.closest = min(self.closest, *(abs(w - self.alpha) for w in weights))
                if max(weights) >= self.alpha:
                    self.longest[row] = max(self.longest[row], step - self.last[row])
                    self.last[row] = step

    def scores(self) -> list[float]:
        """Scores of the rows held, oldest first."""
        now = max(self.last)
        found = []
        for row, last in self.last.items():
            gap = self.longest[row]
            exponent = 1 + (now - last) / (gap + 1e-5)
            recent = 2 / (1 + math.exp(exponent)) if exponent < 700 else 0.0
            often = 2 / (1 + math.exp(gap - 1)) if gap else 0.0
            found.append(recent + often)
        return found

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all other rows."""
        self.last = {row: self.last[row] for row in rows}
        self.longest = {row: self.longest[row] for row in rows}
