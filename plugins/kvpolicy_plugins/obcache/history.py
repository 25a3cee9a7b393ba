"""OBCache with all past queries, from sums that the engine accumulates."""

from typing import ClassVar, get_args

import attrs
from attrs.validators import ge, in_, instance_of, optional
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy_plugins.obcache.saliency import OfSquares, combined, distances


@attrs.define(eq=False, kw_only=True)
class OBCacheHistory:
    """OBCache in place of H2O's sums: all past queries count, and no query is stored.

    For the paper, the equations and the code see ``obcache``. The engine sums ``A^2``, ``A^2 Z``
    and ``A^2 Z^2`` of each row over all queries and the query heads of the group. S^V is exact: the
    first times the square of the value's norm (``obcV_fullhist`` in the code).

    Deviations: S^K and S^VK contain the output of each query, which sums cannot hold; here all
    queries have the mean output of the newest ``window_size``, which is exact where outputs are
    equal. ``obcache`` with ``host = "accumulate"`` and a window of all queries is exact in any case
    (``obcK_fullhist``, ``obcVK_fullhist``). The code compacts after every forward; here a sequence
    is compacted when its buffer is full, or as ``every`` says. If a plan keeps prompts, outputs are
    those of the rows behind them.

    Attributes:
        saliency: ``"v"``, ``"k"``, ``"vk"``, or ``"vk_no_cross"``, S^V + S^K.
        window_size: Most recent queries whose mean output stands for all outputs; not used by
            ``"v"``.
        n_recent: Newest rows that always stay.
        n_sink: First tokens of the sequence that always stay.
        every: Compact when this many rows exceed the budget, 1 for every step; ``None`` means
            when the buffer is full.
    """

    ragged: ClassVar[bool] = True

    saliency: OfSquares = attrs.field(default="v", validator=in_(get_args(OfSquares)))
    window_size: int = attrs.field(default=16, validator=[instance_of(int), ge(1)])
    n_recent: int = attrs.field(default=16, validator=[instance_of(int), ge(0)])
    n_sink: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])
    every: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(1)]))

    @property
    def protects(self) -> tuple[int, int]:
        """The sinks and the recent rows."""
        return self.n_sink, self.n_recent

    @hookimpl(when="every")
    def due(self, num_rows: Tensor, budget: int) -> Tensor:
        """Compact every ``every`` rows."""
        assert self.every is not None
        return num_rows - budget >= self.every

    @hookimpl
    def score(
        self,
        values: Tensor,
        attn_weights: Tensor,
        attn_squares: Tensor,
        attn_squares_logit: Tensor,
        attn_squares_logit2: Tensor,
    ) -> Tensor:
        """Score rows by their saliency for all queries, as if these had one output."""
        values = values.float()
        recent = attn_weights[:, :, -self.window_size :].unflatten(1, (values.shape[1], -1))
        outputs = recent.mean(dim=(2, 3))[:, :, None] @ values  # [B, H_kv, 1, D]
        sums = (attn_squares, attn_squares_logit, attn_squares_logit2)
        squares, logits, logits2 = (one[:, :, None] for one in sums)
        return combined(
            self.saliency, squares, logits, logits2, distances(values, outputs)
        ).squeeze(2)
