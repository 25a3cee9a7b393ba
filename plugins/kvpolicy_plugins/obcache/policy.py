"""OBCache with the queries of a window, each with its own output."""

from collections.abc import Callable
from typing import ClassVar, Literal, get_args

import attrs
import torch
from attrs.validators import ge, in_, instance_of, optional
from torch import Tensor

from kvpolicy import Tracks, hookimpl
from kvpolicy.toolkit import GroupReduce, Pooling, odd, pool
from kvpolicy_plugins.obcache.saliency import Saliency, of_queries

_TRACK = "obcache_saliency"


@attrs.define(eq=False, kw_only=True)
class OBCache:
    """OBCache: keep the rows without which the outputs of attention would change most.

    "OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM Inference", ICML 2026
    (arXiv 2510.07651), equations 4-6: the change of the attention output, to second order, if the
    value of a row, its key, or both become 0 (Optimal Brain Damage). `saliency.py` has the
    formulas. The authors' repository was not available; checked against
    MalachiAjayi/kv-cache-pruner fc1779f, which declares that it computes the same.

    The saliency takes the place of the attention in other methods, which say which queries count
    (``host``) and what becomes of the sum (``pooling``, ``n_recent``):

    * SnapKV's, as in the paper's experiments with prompts: the defaults.
    * TOVA's: ``host = "window"``, ``window_size = 1``, ``kernel_size = 1``, ``n_recent = 0``.
    * H2O's in the code: ``host = "accumulate"``, ``kernel_size = 1``. Of a prompt the last
      ``window_size`` queries count, in decoding all, if at most ``window_size`` tokens come between
      compactions (see ``every``). All queries of a prompt count if ``window_size`` is as large:
      ``_fullhist`` in the code. ``obcache_history`` needs no window, and approximates S^K and S^VK.

    With ``host = "accumulate"`` and ``kernel_size = 7`` it is ``+maxpool`` in the code. There
    ``num_recent`` is both ``window_size`` and ``n_recent``, and the budget is ``num_recent +
    num_heavy``.

    Deviations: rows are chosen per KV head, by the sum over its query heads (appendix B.5; the
    experiments stored one copy per query head); scores are in fp32; of equal scores, which pooling
    makes frequent, the newer row stays. Logits are scaled dot products, before any soft cap. If a
    plan keeps prompts, outputs are those of the rows behind them. S^K, unlike attention, changes if
    a number is added to all logits of a query; as in the paper, nothing is done about it.

    Attributes:
        saliency: ``"v"``, ``"k"``, ``"vk"``; ``"vk_no_cross"``, S^V + S^K; ``"v_p1"``, the sum of
            weights times the 1-norm of the value; or ``"attention"``, the sum of weights.
        host: ``"window"``: the newest queries count at each compaction. ``"accumulate"``: those
            since the last compaction count besides all that counted before.
        window_size: Most recent queries that count at a compaction.
        kernel_size: Rows that are pooled together, odd; 1 for none.
        pooling: ``"maxpool"`` or ``"avgpool"``, which pads with zeros.
        group_reduce: ``"sum"``, ``"mean"`` or ``"max"`` over the query heads of a KV head.
        n_recent: Newest rows that always stay and are not pooled; ``None`` means ``window_size``.
        n_sink: First tokens of the sequence that always stay; 4 in the authors' streaming.
        every: Compact when this many rows exceed the budget, 1 for every step, as in the code;
            ``None`` means when the buffer is full.
        phase: ``"decode"``: prompts and generations are compacted. ``"prefill"``: only the prompt
            is, once, so that the slab grows with the generation (``decode_evict = False`` in the
            code).
    """

    ragged: ClassVar[bool] = True

    saliency: Saliency = attrs.field(default="k", validator=in_(get_args(Saliency)))
    host: Literal["window", "accumulate"] = attrs.field(
        default="window", validator=in_(["window", "accumulate"])
    )
    window_size: int = attrs.field(default=16, validator=[instance_of(int), ge(1)])
    kernel_size: int = attrs.field(default=7, validator=[instance_of(int), ge(1), odd])
    pooling: Pooling = attrs.field(default="maxpool", validator=in_(["maxpool", "avgpool"]))
    group_reduce: GroupReduce = attrs.field(default="sum", validator=in_(["sum", "mean", "max"]))
    n_recent: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(0)]))
    n_sink: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])
    every: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(1)]))
    phase: Literal["decode", "prefill"] = attrs.field(
        default="decode", validator=in_(["decode", "prefill"])
    )

    @property
    def tracks(self) -> tuple[str, ...]:
        """The saliency from all queries that have counted."""
        return (_TRACK,) if self.host == "accumulate" else ()

    @property
    def gives_mass(self) -> bool:
        """Whether scores are masses: other saliencies are squares of changes already."""
        return self.saliency == "attention"

    @property
    def protects(self) -> tuple[int, int]:
        """The sinks and the recent rows."""
        return self.n_sink, self.window_size if self.n_recent is None else self.n_recent

    @property
    def bounded(self) -> bool:
        """Whether the slab has a fixed size: not if only the prompt is compacted."""
        return self.phase == "decode"

    @hookimpl(when=lambda self: self.every is not None or not self.bounded)
    def due(self, num_rows: Tensor, seq_len: Tensor, prompt_len: Tensor, budget: int) -> Tensor:
        """Compact once, when the prompt has been prefilled, or every ``every`` rows."""
        if self.every is None or not self.bounded:
            return seq_len == prompt_len
        return num_rows - budget >= self.every

    @hookimpl
    def score(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_weights: Tensor,
        num_new: Tensor,
        tracks: Tracks,
    ) -> Tensor:
        """Score rows by their saliency."""
        num_kv_heads = keys.shape[1]
        weights = attn_weights[:, :, -self.window_size :].unflatten(1, (num_kv_heads, -1))
        queries = queries[:, :, -self.window_size :].unflatten(1, (num_kv_heads, -1))
        if self.host == "accumulate":
            weights = weights * _is_new(queries, num_new)
        by_head = of_queries(self.saliency, weights, queries, keys, values)  # [B, H_kv, G, T]
        scores = _REDUCTIONS[self.group_reduce](by_head)
        if self.host == "accumulate":
            tracks[_TRACK] = scores = tracks[_TRACK] + scores
        n_recent = self.protects[1]
        before, recent = scores.split([scores.shape[2] - n_recent, n_recent], dim=2)
        return torch.cat([pool(before, self.kernel_size, self.pooling), recent], dim=2)


# Over the query heads of a group.
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda by_head: by_head.sum(dim=2),
    "mean": lambda by_head: by_head.mean(dim=2),
    "max": lambda by_head: by_head.amax(dim=2),
}


def _is_new(queries: Tensor, num_new: Tensor) -> Tensor:
    """Which queries have not counted yet, fp32 ``[B, 1, 1, W, 1]``."""
    age = torch.arange(queries.shape[3], 0, -1, device=queries.device)
    is_new = age <= num_new.to(queries.device, non_blocking=True)[:, None]
    return is_new.float()[:, None, None, :, None]
