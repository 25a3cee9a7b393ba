"""PyramidKV: SnapKV's scores, and more room for the lower layers than for the upper ones."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import attrs
from attrs.validators import ge, in_, instance_of
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.cache.rows import Tracks
from kvpolicy.toolkit.apportion import share
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
class PyramidKV:
    """PyramidKV: rows stay as in SnapKV, more of them in lower layers than in upper ones.

    Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
    Funneling", 2024 (arXiv 2406.02069); code at Zefan-Cai/KVCache-Factory c97f9d7,
    ``PyramidKVCluster``. Beyond the window, the budget falls in even steps from ``2 - 1/beta``
    of the mean in the first layer of the model to ``1/beta`` in the last.

    The plan's budget is the mean of each group of layers and is met exactly: the steps are
    computed once, for the model's depth, by `allocate`, and rounded by largest remainders. The
    stack's other policies keep their rows: nothing falls below what they protect, and listed
    before a policy that scores, as in ``["pyramidkv", "rkv"]``, this one only shares out the
    budgets.

    ``phase="decode"`` (default) scores as ``snapkv`` does by default, whenever the buffer is
    full; the authors leave decoding open. ``phase="prefill"`` is the published one: once, when
    the prompt is in, and never again, so that the slab grows with the generation.

    Deviations: budgets do not depend on the length of the prompt and add up exactly, where the
    code shrinks its steps to the prompt, keeps plain SnapKV's budget in all layers for prompts
    of less than twice the budget, and gives a few rows more on the average
    (`published_budgets` computes its numbers). Softmax and scores in fp32; one copy of a row
    per KV head; of equal scores the newer row stays.

    Attributes:
        phase: ``"decode"`` or ``"prefill"``, see above.
        beta: The last layer gets one part in ``beta`` of the mean; 1 is the same for all.
        window_size: Most recent queries that judge; their own rows always stay.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"`` (beyond the ends counts as zero).
        group_reduce: ``"mean"``, ``"max"`` or ``"sum"`` over the query heads of a KV head;
            only with ``phase="prefill"``.
    """

    tracks: ClassVar[tuple[str, ...]] = ("pyramidkv_rank",)

    phase: Literal["decode", "prefill"] = attrs.field(
        default="decode", validator=in_(["decode", "prefill"])
    )
    beta: float = attrs.field(default=20, validator=[instance_of((int, float)), ge(1)])
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
    def allocate(
        self, layer_indices: Sequence[int], total: int, floors: Sequence[int], num_layers: int
    ) -> list[int]:
        """Share what is not protected in even steps over the depth of the model."""
        least, most = 1 / self.beta, 2 - 1 / self.beta
        depths = [layer_idx / max(num_layers - 1, 1) for layer_idx in layer_indices]
        return share(total, [most - depth * (most - least) for depth in depths], floors)

    @hookimpl
    def due(self, seq_len: Tensor, prompt_len: Tensor) -> Tensor | None:
        """Once, when the prompt is in, if as published."""
        return seq_len == prompt_len if self.phase == "prefill" else None

    @hookimpl
    def score(
        self, queries: Tensor, keys: Tensor, positions: Tensor, seq_len: Tensor, tracks: Tracks
    ) -> Tensor:
        """Rate rows by the window's attention, as SnapKV does; pin the window."""
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

        return score_in_rank_order(score, keys, tracks, "pyramidkv_rank", window)


def published_budgets(
    capacity: int, window_size: int, num_rows: int, num_layers: int, beta: int = 20
) -> list[int]:
    """Rows that each layer keeps of a prompt in the authors' code, the window included.

    Integer floors make the steps smaller than they should be, so that the mean exceeds the
    capacity. The paper divides by the number of layers, the code by one less; the authors
    confirmed the code (KVCache-Factory, issue 36).

    Args:
        capacity: The code's ``max_capacity_prompt``, the mean it aims at.
        window_size: Rows of the window, part of the capacity.
        num_rows: Tokens of the prompt.
        num_layers: Decoder layers, at least 2.
        beta: What the last layer's share is divided by.
    """
    mean = capacity - window_size
    if num_rows < capacity:
        return [num_rows] * num_layers
    if num_rows < 2 * mean:
        return [capacity] * num_layers
    least = mean // beta
    most = 2 * mean - least
    if most >= num_rows - window_size:
        most = num_rows - window_size
        least = 2 * mean - most
    step = (most - least) // (num_layers - 1)
    return [most - layer * step + window_size for layer in range(num_layers)]
