"""Redundancy among keys: how similar each row is to the other rows. Introduced by R-KV."""

from typing import Literal

import torch
from torch import Tensor

from kvpolicy.devices import as_current, runs_in_triton
from kvpolicy.toolkit.ranking import take_rows

Retain = Literal["last", "first"]

# Rows that are compared at once: a tile of similarities is about as large as the keys.
_TILE_ROWS = 64

# Similarities of a tile that a CPU computes at once: they stay in its cache.
_CPU_TILE_BYTES = 4 << 20

# Similarities are subtracted as integers in this unit, which a float holds exactly.
_UNITS = 1 << 32


def key_redundancy(keys: Tensor, *, threshold: float, retain: Retain = "last") -> Tensor:
    """Softmax over rows of each row's mean cosine similarity to the others.

    R-KV, eqs. 5-7; ``cal_similarity`` at Zefan-Cai/R-KV d15c976. Each row exempts one column
    from its similarities. There is no ``T x T`` matrix: the sum of a column over the other rows
    is ``u_j . (sum_i u_i - u_j)``, for unit keys ``u``, and exempt columns are found in tiles of
    rows.

    Args:
        keys: Keys after RoPE, ``[B, H_kv, T, D]``.
        threshold: Cosine similarity above which two keys count as similar.
        retain: Which similar row a row does not make redundant: ``"last"``, the newest, or
            ``"first"``, which in the authors' code means the first row of the cache.

    Returns:
        ``[B, H_kv, T]``, fp32, sums to 1 over the rows.
    """
    if runs_in_triton(keys) and keys.dtype != torch.float64:  # few GPUs multiply fp64 there
        from kvpolicy.toolkit import triton_redundancy

        with as_current(keys.device):
            return triton_redundancy.key_redundancy(keys, threshold=threshold, retain=retain)
    keys = keys.float()
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    total = (unit * (unit.sum(dim=2, keepdim=True) - unit)).sum(dim=3)  # [B, H_kv, T]
    if retain == "first":
        total[:, :, 0] = 0  # every row exempts this one
    else:
        total -= _exempted(unit, _newest_similar(unit, threshold))
    return (total / keys.shape[2]).softmax(dim=-1)


def _newest_similar(unit: Tensor, threshold: float) -> Tensor:
    """The newest similar row of each row, ``[B, H_kv, T]``, int64.

    Row 0 for a row without similar rows, as in the authors' code, which takes the maximum of
    indices and zeros.
    """
    heads, num_rows = unit.flatten(0, 1), unit.shape[2]
    at_once = len(heads)
    if unit.device.type == "cpu":
        at_once = max(1, _CPU_TILE_BYTES // (4 * _TILE_ROWS * num_rows))
    newest = torch.cat([_newest_in_heads(some, threshold) for some in heads.split(at_once)])
    return newest.reshape(unit.shape[:3]).long()


def _newest_in_heads(unit: Tensor, threshold: float) -> Tensor:
    """The newest similar row of each row of some heads, ``[N, T, D]``: ``[N, T]``, fp32."""
    num_rows = unit.shape[1]
    rows = torch.arange(num_rows, dtype=torch.float32, device=unit.device)
    newest = unit.new_zeros(unit.shape[:2])
    for start in range(0, num_rows, _TILE_ROWS):
        # Similarity is symmetric: the tile shows rows from `start` the rows of the tile, too.
        tile, rest = slice(start, start + _TILE_ROWS), slice(start, None)
        similarity = unit[:, tile] @ unit[:, rest].transpose(1, 2)
        # A row is not similar to itself, except where even 0 is above the threshold.
        similarity.diagonal(dim1=1, dim2=2).zero_()
        above = torch.gt(similarity, threshold, out=similarity)  # 0 or 1
        of_tile = (above * rows[rest]).amax(dim=2)
        of_rest = above.mul_(rows[tile, None]).amax(dim=1)
        newest[:, rest] = newest[:, rest].maximum(of_rest)
        newest[:, tile] = newest[:, tile].maximum(of_tile)
    return newest


def _exempted(unit: Tensor, exempt: Tensor) -> Tensor:
    """Of each column, the sum of the similarities of rows that exempt it, ``[B, H_kv, T]``.

    Args:
        unit: Unit keys, ``[B, H_kv, T, D]``.
        exempt: The column that each row exempts, ``[B, H_kv, T]``.
    """
    similarity = (unit * take_rows(unit, exempt)).sum(dim=3)
    rows = torch.arange(unit.shape[2], device=unit.device)
    similarity = similarity.masked_fill(exempt == rows, 0)
    # Integers add up to the same sum in any order, also on a GPU.
    units = (similarity * _UNITS).long()
    return torch.zeros_like(exempt).scatter_add_(2, exempt, units).float() / _UNITS
