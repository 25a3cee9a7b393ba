"""R-KV: importance for the observation window minus redundancy among keys."""

from typing import ClassVar

import attrs
from attrs.validators import ge, in_, instance_of, le
from torch import Tensor

from kvpolicy import Tracks, hookimpl
from kvpolicy.toolkit import (
    Pooling,
    Retain,
    key_redundancy,
    odd,
    score_in_rank_order,
    window_scores,
)


@attrs.define(eq=False, kw_only=True)
class RKV:
    """R-KV: keep rows that are attended to and not redundant, and those of the window.

    Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", 2025
    (arXiv 2505.24133), eqs. 2-8 and algorithm 1; code at Zefan-Cai/R-KV d15c976,
    ``R1KV.update_kv`` and ``cal_similarity``. Where they differ, this follows the code: the
    newest similar row of each row is exempted (beta = 1), columns are averaged, all rows
    including the window's are compared, every KV head chooses its own rows, and neighbours and
    newest rows are those of the authors' cache, which is sorted by descending score.

    Deviations: redundancy is computed for every sequence of a batch (the 2025 code uses row 0
    for all, fixed upstream in 2026); all scores are in fp32; a sequence is compacted when its
    own buffer is full (the code counts all tokens of the process). ``mix_lambda`` is 0.1 as
    in the paper and the 2026 code (0.07 in the 2025 classes). ``retain_ratio`` of the code
    has no effect there and does not exist here.

    Attributes:
        mix_lambda: Weight of the importance; the redundancy weighs ``1 - mix_lambda``.
        window_size: Most recent queries that give the importance; their rows always stay.
        kernel_size: Rows whose importance is pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"``.
        similarity_threshold: Cosine similarity above which two keys count as similar.
        retain_direction: Which similar row is exempted: ``"last"``, the newest, or
            ``"first"``, which in the code means the first row of the cache.
    """

    tracks: ClassVar[tuple[str, ...]] = ("rkv_rank",)

    mix_lambda: float = attrs.field(
        default=0.1, validator=[instance_of((int, float)), ge(0), le(1)]
    )
    window_size: int = attrs.field(default=8, validator=[instance_of(int), ge(1)])
    kernel_size: int = attrs.field(default=7, validator=[instance_of(int), ge(1), odd])
    pooling: Pooling = attrs.field(default="maxpool", validator=in_(["maxpool", "avgpool"]))
    similarity_threshold: float = attrs.field(
        default=0.5, validator=[instance_of((int, float)), ge(-1), le(1)]
    )
    retain_direction: Retain = attrs.field(default="last", validator=in_(["last", "first"]))

    @property
    def protects(self) -> tuple[int, int]:
        """The rows of the window."""
        return 0, self.window_size

    @hookimpl
    def score(self, queries: Tensor, keys: Tensor, tracks: Tracks) -> Tensor:
        """Mix importance and redundancy (eq. 8)."""
        queries = queries[:, :, -self.window_size :]

        def mixed(keys: Tensor) -> Tensor:
            importance = window_scores(
                queries, keys, kernel_size=self.kernel_size, pooling=self.pooling
            )
            return self.mix_lambda * importance - (1 - self.mix_lambda) * self.redundancy(keys)

        return score_in_rank_order(mixed, keys, tracks, "rkv_rank", queries.shape[2])

    def redundancy(self, keys: Tensor) -> Tensor:
        """How similar each row is to the others, ``[B, H_kv, T]`` (eqs. 5-7)."""
        return key_redundancy(
            keys, threshold=self.similarity_threshold, retain=self.retain_direction
        )
