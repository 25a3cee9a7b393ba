"""Merge: fold each row that leaves into the most similar row that stays."""

import math
from typing import Literal

import attrs
import torch
from attrs.validators import ge, in_, instance_of, le
from torch import Tensor
from torch.nn import functional as F

from kvpolicy import LayerRows, Memory, hookimpl
from kvpolicy.toolkit import take_rows

Weights = Literal["exp", "mean"]

# Similarities are rounded to this step, far above the effect of another summation order, so
# that results do not depend on the batch. Sums over up to 1,024 rows are exact.
_STEP = 2.0**-14


@attrs.define(eq=False, kw_only=True)
class Merge:
    """Add-on: fold rows that leave into the most similar rows that stay.

    The token merging of D2O, Wan et al., ICLR 2025 (arXiv 2406.13035); code at
    AIoT-MLSys-Lab/D2O 93adb56, ``D2O_LayerKVCache`` in ``modeling_llama3_7b_13b_d2o.py``.
    Another policy chooses the rows that stay: ``["h2o", "merge"]``. With u the cosine similarity
    of keys,

    * the host of a row i that leaves is the row j that stays with the largest u_ij;
    * i is merged if u_ij >= tau, else forgotten. tau is a moving average over compactions of
      the mean u of all rows that leave: tau <- (1 - beta) tau + beta mean(u), at first mean(u);
    * with the rows i merged into it, key and value of a host become
      ``"exp"``, the paper's:  (e k_j + sum_i exp(u_ij) k_i) / (e + sum_i exp(u_ij));
      ``"mean"``, the code's:  (k_j + sum_i u_ij k_i) / (1 + number of i).

    The first is a convex combination in which the host has the largest weight (u_jj = 1); the
    second shortens the vectors it merges. Hosts keep their positions, and a row into which
    nothing is merged does not change, bit for bit. The memory holds one number, tau, for each
    sequence, layer and KV head. A host has weight e at every compaction, however many rows
    were merged into it before.

    Deviations: every KV head decides for itself (the code averages u over heads, for the i-th
    row that leaves in each, and has one tau per layer); a buffer of rows leaves at once (the
    code evicts after every token); rows that have left a sliding window are forgotten, however
    similar; arithmetic is in fp32, with u rounded to steps of 2^-14 to choose hosts and tau, and
    of equally similar hosts the oldest is chosen. As in the code, keys are merged after RoPE,
    so a merged key has no single position. D2O's allocation among layers is left to the plan.

    Attributes:
        beta: Weight in tau of the rows that leave now (``belta`` in the code, 0.5 there).
        weights: ``"exp"`` or ``"mean"``, see above.
        merge_keys: Whether keys are merged, too. If not, keys choose the host and values are
            merged (CaM, Zhang et al., ICML 2024, and WeightedKV merge values only).
    """

    beta: float = attrs.field(default=0.5, validator=[instance_of((int, float)), ge(0), le(1)])
    weights: Weights = attrs.field(default="exp", validator=in_(["exp", "mean"]))
    merge_keys: bool = attrs.field(default=True, validator=instance_of(bool))

    @hookimpl
    def evict(self, layer_idx: int, rows: LayerRows, keep: Tensor, memory: Memory) -> bool | None:
        """Fold rows that leave into a similar enough row that stays."""
        leave = leaving_rows(keep, rows.num_rows)
        if leave.shape[2] == 0:
            return None
        wide = torch.promote_types(rows.keys.dtype, torch.float32)
        keys, values = rows.keys.to(wide), rows.values.to(wide)
        staying, leaving = (F.normalize(take_rows(keys, at), dim=3) for at in (keep, leave))
        cosines = leaving @ staying.transpose(2, 3)  # [B, H_kv, T - K, K]
        steps, host = (cosines / _STEP).round().max(dim=3)  # [B, H_kv, T - K]
        joins = steps >= self._threshold(layer_idx, steps, memory)[..., None]
        expired = rows.out_of_sight
        if expired is not None:  # rows outside of the sliding window must stay invisible
            joins &= ~expired.gather(2, leave)
        into = F.one_hot(host, keep.shape[2]) * joins[..., None].to(wide)  # [B, H_kv, T - K, K]
        similarity = cosines.gather(3, host[..., None])[..., 0]
        merged = [
            self._fold(take_rows(one, keep), take_rows(one, leave), into, similarity)
            for one in (keys, values)
        ]
        keys, values = (one.to(rows.keys.dtype) for one in merged)
        rows.keep(keep, keys=keys if self.merge_keys else None, values=values)
        return True

    def _threshold(self, layer_idx: int, steps: Tensor, memory: Memory) -> Tensor:
        """Update tau and return it, ``[B, H_kv]``, in steps of `_STEP`."""
        own, layer = memory.of(self), f"layer {layer_idx}"
        for taus, now in zip(own, steps.mean(dim=2), strict=True):
            before: Tensor = taus.get(layer, now)
            taus[layer] = before + self.beta * (now - before)
        return torch.stack([taus[layer] for taus in own])

    def _fold(self, staying: Tensor, leaving: Tensor, into: Tensor, similarity: Tensor) -> Tensor:
        """The rows that stay after merging, ``[B, H_kv, K, D]``."""
        if self.weights == "exp":
            own, weight = math.e, similarity.exp()
            divisor = weight
        else:
            own, weight = 1.0, similarity
            divisor = torch.ones_like(weight)
        added = (into * weight[..., None]).transpose(2, 3) @ leaving
        total = own + (into * divisor[..., None]).sum(dim=2)[..., None]  # [B, H_kv, K, 1]
        is_host = into.any(dim=2)[..., None]
        return torch.where(is_host, (own * staying + added) / total, staying)


def leaving_rows(keep: Tensor, num_rows: int) -> Tensor:
    """Indices of the rows that leave, ``[B, H_kv, T - K]``, int64, rising.

    Args:
        keep: The rows that stay, ``[B, H_kv, K]``.
        num_rows: Rows in all, ``T``.
    """
    stays = torch.zeros(*keep.shape[:2], num_rows, dtype=torch.int8, device=keep.device)
    stays.scatter_(2, keep, 1)
    return stays.sort(dim=2, stable=True).indices[:, :, : num_rows - keep.shape[2]]
