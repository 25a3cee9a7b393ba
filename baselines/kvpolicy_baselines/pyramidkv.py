"""PyramidKV: SnapKV's scores, with larger budgets in lower layers than in upper ones."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import attrs
from attrs.validators import ge, in_, instance_of
from torch import Tensor

from kvpolicy import Tracks, hookimpl, observed_weights
from kvpolicy.toolkit import (
    GroupReduce,
    Pooling,
    largest_remainder,
    odd,
    pooled_window_attention,
    ranked_window_scores,
)


@attrs.define(eq=False, kw_only=True)
class PyramidKV:
    """PyramidKV: keep rows as SnapKV does, more of them in lower layers than in upper ones.

    Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
    Funneling", 2024 (arXiv 2406.02069); code at Zefan-Cai/KVCache-Factory c97f9d7,
    ``PyramidKVCluster``. Without the window, the budget falls linearly from ``2 - 1/beta`` of
    the mean in the first layer of the model to ``1/beta`` in the last.

    The plan's budget is the mean of each group of layers and is met exactly: `allocate` computes
    the budgets once, for the model's depth, and rounds by largest remainders. No budget falls
    below the rows that the stack's policies protect. Listed before a policy that scores, as in
    ``["pyramidkv", "rkv"]``, this one only allocates the budgets.

    ``phase="decode"`` (default) scores as ``snapkv`` does by default, whenever the buffer is
    full; the authors do not describe decoding. ``phase="prefill"`` is the published version:
    compact once, when the prompt has been prefilled, so that the slab grows with the generation.

    Deviations: budgets do not depend on the length of the prompt and add up exactly. The code
    adapts its steps to the prompt, uses SnapKV's budget in all layers for prompts of less than
    twice the budget, and gives a few rows more on average (`published_budgets` computes its
    numbers). Softmax and scores are in fp32; rows are chosen per KV head; of equal scores the
    newer row stays.

    Attributes:
        phase: ``"decode"`` or ``"prefill"``, see above.
        beta: The last layer gets ``1/beta`` of the mean; 1 gives all layers the same.
        window_size: Most recent queries that give the importance; their rows always stay.
        kernel_size: Rows that are pooled together, odd.
        pooling: ``"maxpool"`` or ``"avgpool"``, which pads with zeros.
        group_reduce: ``"mean"``, ``"max"`` or ``"sum"`` over the query heads of a KV head;
            only with ``phase="prefill"``.
    """

    gives_mass: ClassVar[bool] = True
    ragged: ClassVar[bool] = True
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
        """Whether the slab has a fixed size: not if only the prompt is compacted."""
        return self.phase == "decode"

    @property
    def protects(self) -> tuple[int, int]:
        """The rows of the window."""
        return 0, self.window_size

    @hookimpl
    def allocate(
        self, layer_indices: Sequence[int], total: int, floors: Sequence[int], num_layers: int
    ) -> list[int]:
        """Divide the rows that are not protected linearly over the depth of the model."""
        least, most = 1 / self.beta, 2 - 1 / self.beta
        depths = [layer_idx / max(num_layers - 1, 1) for layer_idx in layer_indices]
        return largest_remainder(total, [most - depth * (most - least) for depth in depths], floors)

    @hookimpl(when=lambda self: self.phase == "prefill")
    def due(self, seq_len: Tensor, prompt_len: Tensor) -> Tensor:
        """Compact once, when the prompt has been prefilled."""
        return seq_len == prompt_len

    @hookimpl
    def score(
        self, queries: Tensor, keys: Tensor, positions: Tensor, seq_len: Tensor, tracks: Tracks
    ) -> Tensor:
        """Score rows by the window's attention, as SnapKV does."""
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
            "pyramidkv_rank",
            kernel_size=self.kernel_size,
            pooling=self.pooling,
            present=present,
        )


def published_budgets(
    capacity: int, window_size: int, num_rows: int, num_layers: int, beta: int = 20
) -> list[int]:
    """Rows that each layer keeps of a prompt in the authors' code, including the window.

    Integer floors make the steps smaller than they should be, so that the mean exceeds the
    capacity. The paper divides by the number of layers, the code by one less; the authors
    confirmed the code (KVCache-Factory, issue 36).

    Args:
        capacity: The code's ``max_capacity_prompt``, the intended mean.
        window_size: Rows of the window, part of the capacity.
        num_rows: Tokens of the prompt.
        num_layers: Decoder layers, at least 2.
        beta: The knob of the same name.
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
