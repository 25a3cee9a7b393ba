"""TRIM-KV in plain loops over Python floats; shares nothing with the source."""

import math
from collections.abc import Sequence


def log_sigmoid(u: float) -> float:
    return -math.log1p(math.exp(-u)) if u > -30 else u


def silu(x: float) -> float:
    return x / (1 + math.exp(-x)) if x > -500 else 0.0


def dot(row: Sequence[float], x: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(row, x, strict=True))


def gate_two_linear(weights: dict, x: Sequence[float]) -> list[float]:
    """``logsigmoid(W2 silu(W1 x + b1) + b)`` of one token."""
    hidden = [
        silu(dot(row, x) + b)
        for row, b in zip(weights["linear1.weight"], weights["linear1.bias"], strict=True)
    ]
    return [
        log_sigmoid(dot(row, hidden) + b)
        for row, b in zip(weights["linear2.weight"], weights["bias"], strict=True)
    ]


def gate_mlp(weights: dict, x: Sequence[float]) -> list[float]:
    """``logsigmoid(Wd (silu(Wg x) * (Wu x)) + b)`` of one token."""
    hidden = [
        silu(dot(g, x)) * dot(u, x)
        for g, u in zip(weights["gate_proj.weight"], weights["up_proj.weight"], strict=True)
    ]
    return [
        log_sigmoid(dot(row, hidden) + b)
        for row, b in zip(weights["down_proj.weight"], weights["bias"], strict=True)
    ]


def read_by_rg2(keys: Sequence[Sequence[float]], values: Sequence[Sequence[float]]) -> list[float]:
    """Key and value of each head, one head after the other."""
    return [number for k, v in zip(keys, values, strict=True) for number in [*k, *v]]


def rounds(
    log_beta: Sequence[float],
    lengths: Sequence[int],
    *,
    budget: int,
    newest_age: int,
    n_recent: int,
    horizon: int = 1,
    log_norms: Sequence[float] | None = None,
) -> list[list[int]]:
    """Positions that one head holds after each compaction, at given numbers of tokens."""
    held: list[int] = []
    seen, found = 0, []
    for length in lengths:
        held += range(seen, length)
        seen = length
        ranked = []
        for place, position in enumerate(held):
            age = length - 1 - position + newest_age
            worth = sum(math.exp(log_beta[position] * s) for s in range(horizon))
            score = log_beta[position] * age + math.log(worth)
            if log_norms is not None:
                score += log_norms[position]
            is_recent = place >= len(held) - n_recent
            ranked.append((math.inf if is_recent else score, position))
        held = sorted(position for _, position in sorted(ranked, reverse=True)[:budget])
        found.append(list(held))
    return found


def best_of_heads(
    scores: Sequence[Sequence[float]], rows: int, floor: int, least: float
) -> list[list[int]]:
    """Columns of each head that stay, if heads compete for so many rows."""
    floors = [
        sorted(range(len(head)), key=lambda t, head=head: (head[t], t), reverse=True)[:floor]
        for head in scores
    ]
    others = [
        (head[t], t, h)
        for h, head in enumerate(scores)
        for t in range(len(head))
        if t not in floors[h] and head[t] >= least
    ]
    left = rows - sum(map(len, floors))
    chosen = sorted(others, reverse=True)[:left]
    return [sorted([*floors[h], *(t for _, t, g in chosen if g == h)]) for h in range(len(scores))]


def best_of_model(
    scores: Sequence[Sequence[float]],
    memory: int,
    floor_ratio: float,
    threshold: float | None,
    first_row_counts_before: bool,
) -> list[list[int]]:
    """Rows of each head that stay, if all heads of a model share one budget."""
    if threshold is not None:
        least = math.log(threshold)
        return [[t for t, s in enumerate(head) if s >= least] for head in scores]
    flat = [(s, h, t) for h, head in enumerate(scores) for t, s in enumerate(head)]
    total = memory * len(scores)
    best = sorted(flat, key=lambda one: one[0], reverse=True)
    if not floor_ratio:
        kept = best[:total]
        return [sorted(t for _, h, t in kept if h == head) for head in range(len(scores))]
    counts = [0] * len(scores)
    for _, h, t in best[: int(total * (1 - floor_ratio))]:
        counts[h - 1 if first_row_counts_before and t == 0 and h > 0 else h] += 1
    kept_rows = []
    for head, count in zip(scores, counts, strict=True):
        num = count + int(memory * floor_ratio)
        order = sorted(range(len(head)), key=lambda t, head=head: head[t], reverse=True)
        kept_rows.append(sorted(order[:num]))
    return kept_rows


def occupancy(log_beta: Sequence[float]) -> list[float]:
    """``S_t = sum over i <= t of beta_i^(t-i)``."""
    return [
        sum(math.exp((t - i) * log_beta[i]) for i in range(t + 1)) for t in range(len(log_beta))
    ]


def occupancy_gradient(log_beta: Sequence[float], t: int) -> list[float]:
    """``d S_t / d log beta_i = (t-i) beta_i^(t-i)``."""
    return [
        (t - i) * math.exp((t - i) * log_beta[i]) if i <= t else 0.0 for i in range(len(log_beta))
    ]


def capacity(heads: Sequence[Sequence[float]], memory: float, norm: str) -> float:
    """The capacity loss of some heads, all of one length."""
    hinges = [
        [(t, max(0.0, s - memory)) for t, s in enumerate(occupancy(head), start=1)]
        for head in heads
    ]
    if norm == "paper":
        means = [sum(h / t for t, h in head) / len(head) for head in hinges]
        return sum(means) / len(means)
    active = [h / max(1.0, t - memory) for head in hinges for t, h in head if h > 0]
    return sum(active) / len(active) if active else 0.0
