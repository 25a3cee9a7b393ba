"""H2O: keep the tokens with the most accumulated attention and the most recent ones."""

from typing import ClassVar

import attrs
import torch
from attrs.validators import ge, instance_of, optional
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class H2O:
    """H2O: keep the tokens that received most attention so far, and the most recent ones.

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
    Language Models", 2023 (arXiv 2306.14048), algorithm 1; code at FMInference/H2O ac75c2a,
    ``H2OKVCache_LayerWise``: the score of a row is the sum of the softmax weights it received
    from every query since it was stored, including those of the prompt.

    Deviations: sums are in fp32 (the code uses the model's dtype, which loses small
    increments), cover the query heads of a group (the code has no grouped queries), and are
    separate for every sequence of a batch (the code sums over the batch). The code compacts
    after every forward; here a sequence is compacted when its buffer is full, or as ``every``
    says.

    Attributes:
        n_recent: Newest rows that always stay; ``None`` means half of the budget, as in the
            paper.
        every: Compact when this many rows exceed the budget, 1 for every step; ``None`` means
            when the buffer is full.
    """

    gives_mass: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    n_recent: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(1)]))
    every: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(1)]))

    @property
    def protects(self) -> tuple[int, int]:
        """The recent rows."""
        return 0, self.n_recent or 1

    @hookimpl(when="every")
    def due(self, num_rows: Tensor, budget: int) -> Tensor:
        """Compact every ``every`` rows."""
        assert self.every is not None
        return num_rows - budget >= self.every

    @hookimpl(when=lambda self: self.n_recent is None)
    def protect(self, positions: Tensor, budget: int) -> Tensor:
        """Protect as many recent rows as half of the budget."""
        num_rows = positions.shape[2]
        recent = torch.arange(num_rows, device=positions.device) >= num_rows - max(budget // 2, 1)
        return recent.expand(positions.shape)

    @hookimpl
    def score(self, attn_sums: Tensor) -> Tensor:
        """Score rows by the attention they received."""
        return attn_sums.clone()
