"""SnapKV: attention of the observation window, pooled over neighbouring rows."""

from typing import ClassVar, Literal

import attrs
from attrs.validators import ge, in_, instance_of
from torch import Tensor

from kvpolicy import Tracks, hookimpl, observed_weights
from kvpolicy.toolkit import (
    GroupReduce,
    Pooling,
    odd,
    pooled_window_attention,
    ranked_window_scores,
)


@attrs.define(eq=False, kw_only=True)
class SnapKV:
    """SnapKV: keep the rows that the most recent queries attend to, and those of the window.

    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024
    (arXiv 2404.14469), section 4 and listing 1; code at FasterDecoding/SnapKV e216ddc. As a
    baseline for decoding: Zefan-Cai/R-KV d15c976, ``SnapKV.update_kv``.

    ``phase="decode"`` (default) is R-KV's version: compact when the buffer is full; maximum of
    the logits over the query heads of a group; softmax over the rows before the window; mean
    over the window; max-pooling over neighbours in the authors' cache, which is sorted by
    descending score.

    ``phase="prefill"`` is the published version: compact once, when the prompt has been
    prefilled, so that the slab grows with the generation; softmax over all rows, causal inside
    the window; sum over the window; reduction over the query heads of a group; pooling. The
    authors use ``window_size = 32``, ``kernel_size = 5``, ``pooling = "avgpool"``.

    Deviations: softmax and scores are in fp32; rows are chosen per KV head, where the published
    code stores one copy per query head (``group_reduce`` is an addition); of equal scores,
    which pooling makes frequent, the newer row stays.

    Attributes:
        phase: ``"decode"`` or ``"prefill"``, see above.
        window_size: Most recent queries that give the importance; their rows always stay.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"``, which pads with zeros.
        group_reduce: ``"mean"``, ``"max"`` or ``"sum"`` over the query heads of a KV head;
            only with ``phase="prefill"``.
    """

    gives_mass: ClassVar[bool] = True
    ragged: ClassVar[bool] = True
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
        """Whether the slab has a fixed size: not if only the prompt is compacted."""
        return self.phase == "decode"

    @property
    def protects(self) -> tuple[int, int]:
        """The rows of the window."""
        return 0, self.window_size

    @hookimpl(when=lambda self: self.phase == "prefill")
    def due(self, seq_len: Tensor, prompt_len: Tensor) -> Tensor:
        """Compact once, when the prompt has been prefilled."""
        return seq_len == prompt_len

    @hookimpl
    def score(
        self, queries: Tensor, keys: Tensor, positions: Tensor, seq_len: Tensor, tracks: Tracks
    ) -> Tensor:
        """Score rows by the window's attention."""
        queries = queries[:, :, -self.window_size :]
        present = positions >= 0
        if self.phase == "prefill":
            return pooled_window_attention(
                observed_weights(queries, keys, positions, seq_len, present=present),
                keys.shape[1],
                kernel_size=self.kernel_size,
                pooling=self.pooling,
                group_reduce=self.group_reduce,
            )
        return ranked_window_scores(
            queries,
            keys,
            tracks,
            "snapkv_rank",
            kernel_size=self.kernel_size,
            pooling=self.pooling,
            present=present,
        )
