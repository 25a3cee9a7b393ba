"""Merge: a row that leaves is folded into the row most like it that stays."""

import math
from typing import Literal

import attrs
import torch
from attrs.validators import ge, in_, instance_of, le
from torch import Tensor
from torch.nn import functional as F

from kvpolicy import hookimpl
from kvpolicy.cache.rows import LayerRows
from kvpolicy.state import Memory
from kvpolicy.toolkit.ranking import take_rows

Weights = Literal["exp", "mean"]

# Likeness is decided on in steps of this, far above what adding up in another order changes:
# equal keys are equally like a third in whatever batch. Sums over up to 1,024 rows are exact.
_STEP = 2.0**-14


@attrs.define(eq=False, kw_only=True)
class Merge:
    """Add-on: rows that leave are folded into the rows most like them that stay.

    D2O, Wan et al., ICLR 2025 (arXiv 2406.13035), its merging of tokens; code at
    AIoT-MLSys-Lab/D2O 93adb56, ``D2O_LayerKVCache`` in ``modeling_llama3_7b_13b_d2o.py``. Says
    nothing of which rows stay: ``["h2o", "merge"]``. With u the cosine similarity of keys,

    * the host of a row i that leaves is the row j that stays with the largest u_ij;
    * i is merged if u_ij >= tau, else forgotten. tau is a moving average over compactions of
      the mean u of all rows that leave: tau <- (1 - beta) tau + beta mean(u), at first mean(u);
    * with the rows i merged into it, a host becomes, key and value alike,
      ``"exp"``, the paper's:  (e k_j + sum_i exp(u_ij) k_i) / (e + sum_i exp(u_ij));
      ``"mean"``, the code's:  (k_j + sum_i u_ij k_i) / (1 + number of i).

    The first is a convex combination in which the host weighs at least as much as any other
    (u_jj = 1); the second shortens what it merges. Positions stay those of the hosts, and a row
    into which nothing is merged stays as it is, bit for bit. Remembers one number, tau, for
    each sequence, layer and KV head, and nothing of a row: a host weighs e again the next time,
    however many rows it stands for.

    Deviations: every KV head decides for itself (the code averages u over heads, each head's
    i-th row that leaves, and has one tau a layer); a buffer of rows leaves at once (the code
    evicts after every token); rows that have left a sliding window are forgotten, however like
    a host; arithmetic in fp32, with u in steps of 2^-14 where hosts and tau are decided on, of
    equally good hosts the oldest. As in the code, keys are merged after RoPE, so that a merged
    key is turned to no one place. Which layers keep how much, D2O's other half, is the plan's
    business.

    Attributes:
        beta: Weight of the rows that leave now in tau (``belta`` of the code, 0.5 there).
        weights: ``"exp"`` or ``"mean"``, see above.
        merge_keys: Whether keys are merged, or values only, with keys to find the host (as
            values alone are merged by CaM, Zhang et al., ICML 2024, and WeightedKV).
    """

    beta: float = attrs.field(default=0.5, validator=[instance_of((int, float)), ge(0), le(1)])
    weights: Weights = attrs.field(default="exp", validator=in_(["exp", "mean"]))
    merge_keys: bool = attrs.field(default=True, validator=instance_of(bool))

    @hookimpl
    def evict(self, layer_idx: int, rows: LayerRows, keep: Tensor, memory: Memory) -> bool | None:
        """Fold the rows that leave and are like enough to one that stays into it."""
        leave = leaving_rows(keep, rows.num_rows)
        if leave.shape[2] == 0:
            return None
        wide = torch.promote_types(rows.keys.dtype, torch.float32)
        keys, values = rows.keys.to(wide), rows.values.to(wide)
        staying, leaving = (F.normalize(take_rows(keys, at), dim=3) for at in (keep, leave))
        cosines = leaving @ staying.transpose(2, 3)  # [B, H_kv, T - K, K]
        likeness, host = (cosines / _STEP).round().max(dim=3)  # [B, H_kv, T - K]
        joins = likeness >= self._threshold(layer_idx, likeness, memory)[..., None]
        unseen = rows.out_of_sight
        if unseen is not None:  # a sliding window has left them: nobody is to see them again
            joins &= ~unseen.gather(2, leave)
        into = F.one_hot(host, keep.shape[2]) * joins[..., None].to(wide)  # [B, H_kv, T - K, K]
        similarity = cosines.gather(3, host[..., None])[..., 0]
        merged = [
            self._fold(take_rows(one, keep), take_rows(one, leave), into, similarity)
            for one in (keys, values)
        ]
        keys, values = (one.to(rows.keys.dtype) for one in merged)
        rows.keep(keep, keys=keys if self.merge_keys else None, values=values)
        return True

    def _threshold(self, layer_idx: int, likeness: Tensor, memory: Memory) -> Tensor:
        """How like its host a row must be to be merged, now, ``[B, H_kv]``, in steps."""
        mine, layer = memory.of(self), f"layer {layer_idx}"
        for notes, now in zip(mine, likeness.mean(dim=2), strict=True):
            before: Tensor = notes.get(layer, now)
            notes[layer] = before + self.beta * (now - before)
        return torch.stack([notes[layer] for notes in mine])

    def _fold(self, staying: Tensor, leaving: Tensor, into: Tensor, similarity: Tensor) -> Tensor:
        """What the rows that stay become, ``[B, H_kv, K, D]``."""
        if self.weights == "exp":
            own, weight = math.e, similarity.exp()
            share = weight
        else:
            own, weight = 1.0, similarity
            share = torch.ones_like(weight)
        added = (into * weight[..., None]).transpose(2, 3) @ leaving
        total = own + (into * share[..., None]).sum(dim=2)[..., None]  # [B, H_kv, K, 1]
        is_host = into.any(dim=2)[..., None]
        return torch.where(is_host, (own * staying + added) / total, staying)


def leaving_rows(keep: Tensor, num_rows: int) -> Tensor:
    """The rows that do not stay, ``[B, H_kv, T - K]``, int64, rising.

    Args:
        keep: The rows that do, ``[B, H_kv, K]``.
        num_rows: Rows in all, ``T``.
    """
    stays = torch.zeros(*keep.shape[:2], num_rows, dtype=torch.int8, device=keep.device)
    stays.scatter_(2, keep, 1)
    return stays.sort(dim=2, stable=True).indices[:, :, : num_rows - keep.shape[2]]
