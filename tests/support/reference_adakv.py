"""Ada-KV in plain loops; see `reference` for what an oracle may share with the sources."""

from collections.abc import Mapping, Sequence


def adakv(
    scores: Sequence[Mapping[int, float]], budget: int, alpha_safeguard: float
) -> list[list[int]]:
    """The positions that each head keeps, from the score of each position that it holds.

    Of equal scores the newer row is better, of rows of one position that of the first head.
    """
    num_safe = max(int(budget * alpha_safeguard), 1)
    kept: list[list[int]] = []
    others: list[tuple[float, int, int]] = []
    for head, of_head in enumerate(scores):
        best_first = sorted(of_head, key=lambda position: (-of_head[position], -position))
        kept.append(best_first[:num_safe])
        others += [(-of_head[row], -row, head) for row in best_first[num_safe:]]
    room = budget * len(scores) - sum(len(rows) for rows in kept)
    for _, negative, head in sorted(others)[:room]:
        kept[head].append(-negative)
    return [sorted(rows) for rows in kept]
