"""H2O: heavy hitters by accumulated attention, and the most recent tokens."""

import attrs
import torch
from attrs.validators import ge, instance_of, optional
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class H2O:
    """H2O: the tokens that received most attention so far, and the most recent ones, stay.

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
    Language Models", 2023 (arXiv 2306.14048), algorithm 1; code at FMInference/H2O ac75c2a,
    ``H2OKVCache_LayerWise``: the score of a row is the sum of the softmax weights it received
    from every query since it was stored, the prompt's included.

    Deviations: sums are kept in fp32 (the code keeps the model's dtype, in which small
    increments are lost), are summed over the query heads of a group (the code knows no
    grouped queries), and are kept for every sequence of a batch (the code sums over it). The
    code compacts after every forward; here a sequence is compacted when its buffer is full,
    unless ``every`` says otherwise.

    Attributes:
        n_recent: Newest rows that always stay; ``None`` means half of the budget, as in the
            paper.
        every: Compact as soon as so many rows are over the budget, 1 for every step;
            ``None`` means when the buffer is full.
    """

    n_recent: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(1)]))
    every: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(1)]))

    @property
    def protects(self) -> tuple[int, int]:
        """The recent rows."""
        return 0, self.n_recent or 1

    @hookimpl
    def due(self, num_rows: Tensor, budget: int) -> Tensor | None:
        """Every so many rows, if asked."""
        return None if self.every is None else num_rows - budget >= self.every

    @hookimpl
    def score(self, attn_sums: Tensor, budget: int) -> Tensor:
        """Rate rows by the attention they received; pin the recent ones."""
        n_recent = max(budget // 2, 1) if self.n_recent is None else self.n_recent
        scores = attn_sums.clone()
        scores[:, :, -n_recent:] = torch.inf
        return scores
