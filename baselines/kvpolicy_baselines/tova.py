"""TOVA: what the newest query attends to least, leaves."""

import attrs
import torch
from attrs.validators import ge, instance_of, optional
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class TOVA:
    """TOVA: the token that the newest query attends to least leaves, for all heads at once.

    Oren et al., "Transformers are Multi-State RNNs", 2024 (arXiv 2401.06104); code
    at schwartz-lab-NLP/TOVA 9c7d09b, ``TOVACache.reduce``: softmax weights of the newest query,
    averaged over all query heads of the layer; the best rows stay, the same ones for every KV
    head; the newest row is not protected. Rows leave after every forward.

    Deviations: softmax and mean in fp32; a prompt longer than the slab enters in chunks, and is
    compacted in between, where the code reduces it once, when all of it is in.

    Attributes:
        every: Compact as soon as so many rows are over the budget, 1 for every step, as
            published; ``None`` means when the buffer is full.
        n_recent: Newest rows that always stay; kvpress' ``TOVAPress`` has 1.
    """

    every: int | None = attrs.field(
        default=1,
        validator=optional([instance_of(int), ge(1)]),  # type: ignore[arg-type]  # None is meant
    )
    n_recent: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])

    @property
    def protects(self) -> tuple[int, int]:
        """The recent rows, if any."""
        return 0, self.n_recent

    @hookimpl
    def due(self, num_rows: Tensor, budget: int) -> Tensor | None:
        """Every so many rows; by default at every step."""
        return None if self.every is None else num_rows - budget >= self.every

    @hookimpl
    def score(self, attn_weights: Tensor, positions: Tensor) -> Tensor:
        """Rate rows by the newest query's weights, the mean of all query heads."""
        weights = attn_weights[:, :, -1].mean(dim=1, keepdim=True)  # [B, 1, T]
        scores = weights.repeat(1, positions.shape[1], 1)
        scores[:, :, max(positions.shape[2] - self.n_recent, 0) :] = torch.inf
        return scores
