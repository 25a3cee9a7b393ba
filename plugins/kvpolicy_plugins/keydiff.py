"""KeyDiff: keep the keys that differ most from the mean direction of all keys."""

from typing import ClassVar

import attrs
from attrs.validators import ge, instance_of
from torch import Tensor
from torch.nn import functional as F

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class KeyDiff:
    """KeyDiff: keep the rows whose keys have the least cosine similarity with the mean key.

    Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments", 2025 (arXiv 2504.15364), section 4; ``KeyDiffPress`` of
    kvpress 0.5.5. With rows ``k_i`` that a head holds, after RoPE:

        anchor = mean_i k_i / |k_i|
        score_i = -cos(k_i, anchor)

    No attention is read. The paper evicts block by block, in prefill and in decoding; a block is
    the plan's buffer here.

    Deviations: scores are in fp32, and of equal scores the newer row stays; ``n_recent`` is an
    addition.

    Attributes:
        n_recent: Newest rows that always stay.
    """

    ragged: ClassVar[bool] = True

    n_recent: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])

    @property
    def protects(self) -> tuple[int, int]:
        """The recent rows."""
        return 0, self.n_recent

    @hookimpl
    def score(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Score keys higher the less they resemble the mean key."""
        directions = F.normalize(keys.float(), dim=-1)
        # Columns that a head has no row for hold zeros.
        num_rows = (positions >= 0).sum(dim=2, keepdim=True).clamp(min=1)
        anchor = directions.sum(dim=2) / num_rows  # [B, H_kv, D]
        return -(directions @ F.normalize(anchor, dim=-1).unsqueeze(-1)).squeeze(-1)
