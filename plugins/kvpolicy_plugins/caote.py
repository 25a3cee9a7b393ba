"""CAOTE: rows are ranked by how much the output of attention would change without them."""

from collections.abc import Generator
from typing import ClassVar

import attrs
import torch
from attrs.validators import instance_of
from torch import Tensor

from kvpolicy import hookimpl

# Weights this close to 1 count as this close, so that a row with all of the mass has a score.
_LEAST_REST = 1e-6
# Where all values are equal nothing changes the output, and the scores below decide.
_LEAST_DISTANCE = 1e-20


@attrs.define(eq=False, kw_only=True)
class CAOTE:
    """CAOTE: rank rows by the change of the attention output that removing them would cause.

    Goel et al., "CAOTE: KV Cache Selection for LLMs via Attention Output Error-Based Token
    Eviction", 2025 (arXiv 2504.14051 v6), theorems 3.1 and 3.2; no code is published. It re-ranks
    any scores that are masses: ``["h2o", "caote"]``. With these as weights ``h`` that sum to 1, and
    the values ``v``,

        X   = sum of h_i v_i
        c_j = h_j / (1 - h_j) |X - v_j|

    is the norm of the change of ``X`` if row j leaves and the other weights are divided by
    ``1 - h_j``. All rows have a part in the sums, protected ones too. FastCAOTE has the mean of the
    values in the place of ``X``.

    Scores must be masses, which policies declare (``gives_mass``): a plan is refused whose scores
    below are norms, ages, or ranks. The scores of the policy below are as it answers them: its
    pooling comes before, and those of a group of query heads have been reduced to one.

    Deviations: the paper removes 128 rows after each block of 128, and one at each step of
    decoding; here, rows leave when the policies below, or the buffer, say so. ``greedy`` is an
    addition. Changes for each query head are not computed, as scores are per KV head. If a plan
    keeps prompts, the sums are those of the rows behind them.

    Attributes:
        fast: FastCAOTE, see above.
        greedy: Remove one row after the other, each time with the weights and the output of those
            left; ``False``: the rows with the lowest scores leave together, as published. It takes
            one step for each row that leaves, and each head must have the budget for itself.
    """

    needs_mass: ClassVar[bool] = True

    fast: bool = attrs.field(default=False, validator=instance_of(bool))
    greedy: bool = attrs.field(default=False, validator=instance_of(bool))

    @property
    def ragged(self) -> bool:
        """Whether heads may hold different numbers of rows: not if one row leaves at a time."""
        return not self.greedy

    @hookimpl(wrapper=True)
    def score(
        self, values: Tensor, positions: Tensor, protected: Tensor, budget: int
    ) -> Generator[None, Tensor, Tensor]:
        """Score rows by the change of the output."""
        masses = (yield).float()
        values, present = values.float(), positions >= 0
        first_out = masses == -torch.inf
        masses = masses.clamp(min=0).masked_fill(~present, 0)
        if not self.greedy:
            changes = self._changes(masses, values, present)
        else:
            changes = self._one_by_one(masses, values, protected, budget)
        return changes.masked_fill(first_out, -torch.inf)

    def _one_by_one(self, masses: Tensor, values: Tensor, protected: Tensor, budget: int) -> Tensor:
        """Changes by the rows that stay, and below them the others in the order of leaving."""
        present = torch.ones_like(protected)
        num_out = max(masses.shape[2] - budget, 0)
        order = torch.zeros_like(masses)
        changes = self._changes(masses, values, present)
        for place in range(num_out):
            # Of equal ones the oldest leaves.
            may_leave = present & ~protected
            first = changes.masked_fill(~may_leave, torch.inf).argmin(dim=2, keepdim=True)
            order.scatter_(2, first, place - num_out)
            present = present.scatter(2, first, False)
            masses = masses.scatter(2, first, 0)
            changes = self._changes(masses, values, present)
        return changes.where(present, order)

    def _changes(self, masses: Tensor, values: Tensor, present: Tensor) -> Tensor:
        """``c``, ``[B, H_kv, T]``, among rows that are present.

        Args:
            masses: ``[B, H_kv, T]``, 0 for rows that are not present.
            values: ``[B, H_kv, T, D]``.
            present: Bool ``[B, H_kv, T]``.
        """
        of_output = present.float() if self.fast else masses
        output = _shares(of_output)[:, :, None] @ values  # [B, H_kv, 1, D]
        shares = _shares(masses)
        distance = (values - output).norm(dim=-1).clamp(min=_LEAST_DISTANCE)
        return shares / (1 - shares).clamp(min=_LEAST_REST) * distance


def _shares(masses: Tensor) -> Tensor:
    total = masses.sum(dim=2, keepdim=True)
    return masses / total.where(total > 0, 1)
