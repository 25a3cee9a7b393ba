"""Sensitivity of layers and division of a budget, in plain loops; imports nothing of kvpolicy."""

import math
from collections.abc import Sequence
from typing import Any

import torch


def block_mask(num_tokens: int, block: int) -> torch.Tensor:
    """``[1, 1, T, T]``: what is added to logits; a token sees the tokens of its block up to it."""
    mask = torch.full((1, 1, num_tokens, num_tokens), -math.inf)
    for row in range(num_tokens):
        for column in range(row + 1):
            if row // block == column // block:
                mask[0, 0, row, column] = 0.0
    return mask


def sensitivity(model: Any, texts: Sequence[Sequence[int]], block: int) -> list[float]:
    """One forward with a causal and one with a block mask; cosines one by one."""
    from transformers import DynamicCache

    from kvpolicy.compat import cache_argument

    sums: list[float] = []
    count = 0
    for ids in texts:
        caches = []
        for size in (len(ids), block):
            cache = DynamicCache()
            with torch.no_grad():
                model(
                    input_ids=torch.tensor([ids]),
                    attention_mask=block_mask(len(ids), size),
                    **cache_argument(cache),
                )
            caches.append(cache)
        num_layers = len(caches[0].layers)
        sums = sums or [0.0] * num_layers
        for layer in range(num_layers):
            full, blocks = (cache.layers[layer].keys[0].double() for cache in caches)
            for head in range(full.shape[0]):
                for row in range(len(ids)):
                    a, b = full[head, row].tolist(), blocks[head, row].tolist()
                    dot = sum(x * y for x, y in zip(a, b, strict=True))
                    norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
                    sums[layer] += dot / norms
        count += caches[0].layers[0].keys.shape[1] * len(ids)
    return [1 - total / count for total in sums]


def shares(total: int, weights: Sequence[float], floors: Sequence[int]) -> list[float]:
    """Real parts ``max(floor, x * weight)`` whose sum is the total: bisection for ``x``."""
    low, high = 0.0, float(total) / min(weight for weight in weights if weight > 0)
    for _ in range(200):
        x = (low + high) / 2
        if (
            sum(max(floor, x * weight) for weight, floor in zip(weights, floors, strict=True))
            > total
        ):
            high = x
        else:
            low = x
    return [max(floor, low * weight) for weight, floor in zip(weights, floors, strict=True)]
