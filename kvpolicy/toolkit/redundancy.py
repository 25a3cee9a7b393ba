"""Redundancy among keys: how similar each row is to the other rows. Introduced by R-KV."""

from typing import Literal

import torch
from torch import Tensor

Retain = Literal["last", "first"]

# Similarities held at once. The full matrix would be T x T for each KV head and sequence.
_TILE_ELEMENTS = 1 << 22


def key_redundancy(keys: Tensor, *, threshold: float, retain: Retain = "last") -> Tensor:
    """Softmax over rows of each row's mean cosine similarity to the others.

    R-KV, eqs. 5-7; ``cal_similarity`` at Zefan-Cai/R-KV d15c976. Computed in tiles of rows,
    never as a ``T x T`` matrix.

    Args:
        keys: Keys after RoPE, ``[B, H_kv, T, D]``.
        threshold: Cosine similarity above which two keys count as similar.
        retain: Which similar row a row does not make redundant: ``"last"``, the newest, or
            ``"first"``, which in the authors' code means the first row of the cache.

    Returns:
        ``[B, H_kv, T]``, fp32, sums to 1 over the rows.
    """
    keys = keys.float()
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    num_rows = keys.shape[2]
    total = unit.new_zeros(keys.shape[:3])
    tile = max(1, _TILE_ELEMENTS // total.numel())
    for start in range(0, num_rows, tile):
        similarity = unit[:, :, start : start + tile] @ unit.transpose(2, 3)
        similarity.diagonal(offset=start, dim1=2, dim2=3).zero_()
        exempt = _exempt(similarity, threshold, retain)
        total += similarity.scatter_(3, exempt, 0).sum(dim=2)
    return (total / num_rows).softmax(dim=-1)


def _exempt(similarity: Tensor, threshold: float, retain: Retain) -> Tensor:
    """For each row of a tile, the column that it does not make redundant, ``[..., 1]``.

    A row without similar rows exempts column 0, as in the authors' code, which takes the
    maximum of indices and zeros.
    """
    columns = torch.arange(similarity.shape[3], device=similarity.device)
    if retain == "first":
        columns = torch.zeros_like(columns)
    return ((similarity > threshold) * columns).amax(dim=3, keepdim=True)
