"""TOVA: evict the token that the newest query attends to least."""

from typing import ClassVar

import attrs
from attrs.validators import ge, instance_of, optional
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class TOVA:
    """TOVA: evict the token that the newest query attends to least, in all heads at once.

    Oren et al., "Transformers are Multi-State RNNs", 2024 (arXiv 2401.06104); code
    at schwartz-lab-NLP/TOVA 9c7d09b, ``TOVACache.reduce``: softmax weights of the newest query,
    averaged over all query heads of the layer; the best rows stay, the same ones for every KV
    head; the newest row is not protected. Rows leave after every forward.

    Deviations: softmax and mean are in fp32; a prompt longer than the slab is prefilled in
    chunks with compactions in between, where the code compacts it once at the end.

    Attributes:
        every: Compact when this many rows exceed the budget, 1 for every step, as published;
            ``None`` means when the buffer is full.
        n_recent: Newest rows that always stay; 1 in kvpress' ``TOVAPress``.
    """

    gives_mass: ClassVar[bool] = True

    every: int | None = attrs.field(
        default=1,
        validator=optional([instance_of(int), ge(1)]),  # type: ignore[arg-type]  # None is meant
    )
    n_recent: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])

    @property
    def protects(self) -> tuple[int, int]:
        """The recent rows, if any."""
        return 0, self.n_recent

    @hookimpl(when="every")
    def due(self, num_rows: Tensor, budget: int) -> Tensor:
        """Compact every ``every`` rows."""
        assert self.every is not None
        return num_rows - budget >= self.every

    @hookimpl
    def score(self, attn_weights: Tensor, positions: Tensor) -> Tensor:
        """Score rows by the newest query's weights, averaged over all query heads."""
        weights = attn_weights[:, :, -1].mean(dim=1, keepdim=True)  # [B, 1, T]
        return weights.repeat(1, positions.shape[1], 1)
