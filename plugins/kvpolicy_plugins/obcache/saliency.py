"""The saliencies of OBCache, from sums over queries or from each query's output.

With the weights ``A`` of some queries, their logits ``Z`` and outputs ``o``, and the value ``v`` of
a row, all of them per query head:

    S^V   = sum of A^2 |v|^2                      the value becomes 0: exact
    S^K   = sum of A^2 Z^2 |v - o|^2              the key becomes 0, to second order
    S^VK  = S^V + S^K + 2 sum of A^2 Z v.(v - o)  both do: the sum of A^2 |v + Z (v - o)|^2

Shapes: ``[B, H_kv, G, W, T]`` for ``G`` query heads of a group, ``W`` queries and ``T`` rows, or
any that broadcast.
"""

from typing import Literal

import attrs
import torch
from torch import Tensor

Saliency = Literal["v", "k", "vk", "vk_no_cross", "v_p1", "attention"]
OfSquares = Literal["v", "k", "vk", "vk_no_cross"]


@attrs.frozen(eq=False)
class Distances:
    """What the saliencies need of values and outputs.

    Attributes:
        values: ``|v|^2``.
        along: ``v . (v - o)``.
        apart: ``|v - o|^2``.
    """

    values: Tensor
    along: Tensor
    apart: Tensor


def distances(values: Tensor, outputs: Tensor) -> Distances:
    """Distances of values and outputs, without a tensor of ``W * T * D`` numbers.

    Args:
        values: ``[..., T, D]``, fp32.
        outputs: ``[..., W, D]``, fp32.

    Returns:
        ``[..., W, T]`` each, or ``[..., 1, T]``.
    """
    of_values = values.square().sum(dim=-1)[..., None, :]
    of_outputs = outputs.square().sum(dim=-1, keepdim=True)
    products = outputs @ values.mT
    along = of_values - products
    apart = (along - products + of_outputs).clamp(min=0)  # rounding of equal vectors
    return Distances(of_values, along, apart)


def combined(
    saliency: OfSquares, squares: Tensor, logits: Tensor, logits2: Tensor, found: Distances
) -> Tensor:
    """A saliency from ``A^2``, ``A^2 Z`` and ``A^2 Z^2``, or from sums of them over queries."""
    if saliency == "v":
        return squares * found.values
    by_key = logits2 * found.apart
    if saliency == "k":
        return by_key
    both = squares * found.values + by_key
    if saliency == "vk":
        both = both + 2 * logits * found.along
    return both.clamp(min=0)


def of_queries(
    saliency: Saliency, weights: Tensor, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """A saliency of rows, summed over some queries, by query head: ``[B, H_kv, G, T]``, fp32.

    Args:
        saliency: Which.
        weights: Weights of the queries, ``[B, H_kv, G, W, T]``, fp32; 0 in all rows for a query
            that does not count.
        queries: The queries, ``[B, H_kv, G, W, D]``.
        keys: ``[B, H_kv, T, D]``.
        values: ``[B, H_kv, T, D]``.
    """
    if saliency == "attention":
        return weights.sum(dim=3)
    values = values.float()[:, :, None]  # [B, H_kv, 1, T, D]
    if saliency == "v_p1":
        return weights.sum(dim=3) * values.abs().sum(dim=-1)
    squares = weights.square()
    if saliency == "v":
        return squares.sum(dim=3) * values.square().sum(dim=-1)
    logits = queries.float() @ keys.float()[:, :, None].mT * keys.shape[-1] ** -0.5
    logits = torch.where(weights > 0, logits, 0)
    found = distances(values, weights @ values)
    by_logit = squares * logits
    return combined(saliency, squares, by_logit, by_logit * logits, found).sum(dim=3)
