"""SnapKV: attention of the observation window, pooled over neighbours."""

from typing import ClassVar, Literal

import attrs
from attrs.validators import ge, in_, instance_of
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.cache.rows import Tracks
from kvpolicy.toolkit.attention_window import (
    GroupReduce,
    Pooling,
    observed_weights,
    odd,
    pin_window,
    received_importance,
    window_importance,
)
from kvpolicy.toolkit.ranking import score_in_rank_order


@attrs.define(eq=False, kw_only=True)
class SnapKV:
    """SnapKV: rows that the most recent queries attend to, and those queries' own rows, stay.

    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024
    (arXiv 2404.14469), section 4 and listing 1; code at FasterDecoding/SnapKV e216ddc. As a
    baseline for decoding: Zefan-Cai/R-KV d15c976, ``SnapKV.update_kv``.

    ``phase="decode"`` (default) is R-KV's: whenever the buffer is full; logits reduced by
    their maximum over the query heads of a group; softmax over the rows before the window;
    mean over the window; max-pooled over neighbours in the authors' cache, which holds rows
    by descending score.

    ``phase="prefill"`` is the published one: once, when the prompt is in, and never again,
    so that the slab grows with the generation; softmax over all rows, causal inside the
    window; sum over the window; reduced over the query heads of a group; pooled. The authors
    run it with ``window_size = 32``, ``kernel_size = 5``, ``pooling = "avgpool"``.

    Deviations: softmax and scores in fp32; one copy of a row per KV head, where the published
    code stores one per query head (``group_reduce`` is ours); of equal scores, which pooling
    makes frequent, the newer row stays.

    Attributes:
        phase: ``"decode"`` or ``"prefill"``, see above.
        window_size: Most recent queries that judge; their own rows always stay.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"`` (beyond the ends counts as zero).
        group_reduce: ``"mean"``, ``"max"`` or ``"sum"`` over the query heads of a KV head;
            only with ``phase="prefill"``.
    """

    tracks: ClassVar[tuple[str, ...]] = ("snapkv_rank",)

    phase: Literal["decode", "prefill"] = attrs.field(
        default="decode", validator=in_(["decode", "prefill"])
    )
    window_size: int = attrs.field(default=8, validator=[instance_of(int), ge(1)])
    kernel_size: int = attrs.field(default=7, validator=[instance_of(int), ge(1), odd])
    pooling: Pooling = attrs.field(default="maxpool", validator=in_(["maxpool", "avgpool"]))
    group_reduce: GroupReduce = attrs.field(default="mean", validator=in_(["mean", "max", "sum"]))

    @property
    def bounded(self) -> bool:
        """Whether the slab has a fixed size: not if only the prompt is ever compacted."""
        return self.phase == "decode"

    @property
    def protects(self) -> tuple[int, int]:
        """The rows of the window."""
        return 0, self.window_size

    @hookimpl
    def due(self, seq_len: Tensor, prompt_len: Tensor) -> Tensor | None:
        """Once, when the prompt is in, if as published."""
        return seq_len == prompt_len if self.phase == "prefill" else None

    @hookimpl
    def score(
        self, queries: Tensor, keys: Tensor, positions: Tensor, seq_len: Tensor, tracks: Tracks
    ) -> Tensor:
        """Rate rows by the window's attention; pin the window."""
        queries = queries[:, :, -self.window_size :]
        window = queries.shape[2]
        if self.phase == "prefill":
            importance = received_importance(
                observed_weights(queries, keys, positions, seq_len),
                keys.shape[1],
                kernel_size=self.kernel_size,
                pooling=self.pooling,
                group_reduce=self.group_reduce,
            )
            return pin_window(importance, window)

        def score(keys: Tensor) -> Tensor:
            importance = window_importance(
                queries, keys, kernel_size=self.kernel_size, pooling=self.pooling
            )
            return pin_window(importance, window)

        return score_in_rank_order(score, keys, tracks, "snapkv_rank", window)
