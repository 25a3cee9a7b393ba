"""Last used: rows stay that a query has used a short time ago."""

from typing import ClassVar

import attrs
import torch
from attrs.validators import ge, instance_of, lt
from torch import Tensor

from kvpolicy import Tracks, hookimpl


@attrs.define(eq=False, kw_only=True)
class LastUsed:
    """Rows stay that a query has used a short time ago.

    A cache of disk pages evicts what was not used for the longest time; this is the same for rows.
    The position of each row's last use is a track: it moves with the row, and a compaction adds
    what the newest queries have used. An example without a paper; LazyEviction and RaaS keep the
    same number.

    Attributes:
        threshold: Attention weight above which a query uses a row.
        window_size: Newest queries that a compaction looks at. With the plan's buffer these are all
            since the last one; of a prompt, they are its last tokens.
    """

    tracks: ClassVar[tuple[str, ...]] = ("last_used",)

    threshold: float = attrs.field(
        default=0.02, converter=float, validator=[instance_of(float), ge(0), lt(1)]
    )
    window_size: int = attrs.field(default=16, validator=[instance_of(int), ge(1)])

    @hookimpl
    def score(
        self, attn_weights: Tensor, positions: Tensor, seq_len: Tensor, tracks: Tracks
    ) -> Tensor:
        """Score rows by the position of the query that used them last; their own if none did."""
        weights = attn_weights[:, :, -self.window_size :]
        num_queries, num_heads = weights.shape[2], positions.shape[1]
        used = (weights > self.threshold).unflatten(1, (num_heads, -1)).any(dim=2)
        newest = torch.arange(-num_queries, 0, device=positions.device)
        at = seq_len.to(positions.device, non_blocking=True)[:, None] + newest  # [B, W]
        last = torch.where(used, at[:, None, :, None], 0).amax(dim=2)
        last = last.maximum(positions).maximum(tracks["last_used"].long())
        tracks["last_used"] = last.float()
        return last.double()
