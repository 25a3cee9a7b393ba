"""LazyEviction: keep rows that are likely to be used again, by how far apart their uses were."""

from typing import ClassVar

import attrs
import torch
from attrs.validators import ge, gt, instance_of, lt
from torch import Tensor

from kvpolicy import Tracks, hookimpl


@attrs.define(eq=False, kw_only=True)
class LazyEviction:
    """LazyEviction: keep the rows whose last use lies within their longest gap between uses.

    Zhang et al., "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient
    Long Reasoning", 2025 (arXiv 2506.15969); the formulas are those of the authors' code,
    ``Window_LAZYKVCluster`` and ``TempCache``, as WeianMao/triattention e7a0eb1 holds it; the text
    of the paper was not available. A query *uses* a row if it gives it a weight of at least
    ``alpha``. With the last use ``TS`` and the longest gap between two uses ``MRI`` (maximum
    recurrence interval), at step ``t``:

        H1 = 2 sigmoid(-1 - (t - TS) / (MRI + 1e-5))
        H2 = 2 sigmoid(1 - MRI), or 0 if MRI = 0
        score = H1 + H2

    A new row counts as used one step before its token. Every ``window_size`` steps, the rows with
    the highest scores stay, and those of the last ``window_size`` tokens. That lag is the plan's
    buffer here: set ``buffer`` and ``window_size`` to the same number.

    Uses are read at a compaction, from the last ``window_size`` queries. As rows leave only then,
    this equals following every step, if the buffer is not larger than ``window_size`` and the first
    compaction is ``window_size`` steps behind the prompt.

    Deviations: uses by queries before the last ``window_size`` ones are not seen, so that at the
    first compaction rows count as used directly before these; queries of a prompt count where they
    are among these, as a prompt may be compacted, too (the authors keep prompts; ``prompt =
    "keep"`` does). Rows are chosen per KV head, and a use is one by any query head of the group,
    where the code repeats rows for every query head. Weights and scores are in fp32; of equal
    scores the newer row stays.

    Attributes:
        window_size: Most recent queries whose uses are read; their rows always stay.
        alpha: Least attention weight of a use.
    """

    ragged: ClassVar[bool] = True
    stages_prompts: ClassVar[bool] = False  # uses by queries before the window are not seen
    tracks: ClassVar[tuple[str, ...]] = ("lazy_last", "lazy_interval")

    window_size: int = attrs.field(default=32, validator=[instance_of(int), ge(1)])
    alpha: float = attrs.field(default=1e-4, validator=[instance_of(float), gt(0), lt(1)])

    @property
    def protects(self) -> tuple[int, int]:
        """The rows of the window."""
        return 0, self.window_size

    @hookimpl
    def score(
        self,
        attn_weights: Tensor,
        positions: Tensor,
        seq_len: Tensor,
        num_new: Tensor,
        tracks: Tracks,
    ) -> Tensor:
        """Read the uses since the last compaction, and score rows by last use and longest gap."""
        device, num_heads = positions.device, positions.shape[1]
        end = seq_len.to(device, non_blocking=True)[:, None, None]
        num_new = num_new.to(device, non_blocking=True)[:, None, None]
        weights = attn_weights[:, :, -self.window_size :]
        num_queries = weights.shape[2]
        begin = end - num_new.clamp(max=num_queries)  # the first query that is read
        queries = end + torch.arange(-num_queries, 0, device=device)[:, None]  # [B, W, 1]
        used = (weights >= self.alpha).unflatten(1, (num_heads, -1)).any(dim=2)
        used = used & (queries >= begin)[:, None]  # [B, H_kv, W, T]

        is_new = positions >= end - num_new
        last = (positions.maximum(begin) - 1).float().where(is_new, tracks["lazy_last"])
        interval = tracks["lazy_interval"].masked_fill(is_new, 0)
        at = queries[:, None].float()
        # The last use before each query, and behind all of them.
        uses = torch.cat([last[:, :, None], at.where(used, -1)], dim=2).cummax(dim=2).values
        gaps = (at - uses[:, :, :-1]).where(used, 0)
        tracks["lazy_last"] = last = uses[:, :, -1]
        tracks["lazy_interval"] = interval = interval.maximum(gaps.amax(dim=2))

        within = 2 * torch.sigmoid(-1 - (end - 1 - last) / (interval + 1e-5))
        often = (2 * torch.sigmoid(1 - interval)).where(interval > 0, 0)
        return within + often
