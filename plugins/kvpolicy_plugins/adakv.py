"""Ada-KV: the heads of a layer share its budget, by the scores of whatever policy is below."""

from typing import ClassVar

import attrs
import torch
from attrs.validators import ge, instance_of, le
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False, kw_only=True)
class AdaKV:
    """Ada-KV: of all heads of a layer together, keep the rows with the highest scores.

    Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient
    LLM Inference", 2024 (arXiv 2407.11550), algorithms 1 and 2; ``AdaKVPress`` of kvpress 0.5.5,
    which works over the scores of any method, as this does: list it after the policy that scores,
    ``["snapkv", "adakv"]``, in a plan with ``heads = "shared"``. Its scores must be comparable
    between heads, as shares of attention are.

    * The best ``int(alpha_safeguard * budget)`` rows of each head stay.
    * Of the other rows of all heads, the best stay, ``budget * H_kv`` in all.

    Where each head has the budget for itself there is nothing to share: this policy has no
    opinion then, each head keeps its best rows, and `kvpolicy plan check` says so.

    Deviations: at least one row of each head stays, as a head without rows cannot attend; of equal
    scores, the newer row stays. The authors' code (FFY0/AdaKV 0ae8e19, ``AdaptiveSnapKVCluster``)
    has another safeguard: a head has ``1 - alpha`` times the rows that it has in the flat ranking
    plus ``alpha`` times the uniform budget, so that even heads with many rows move towards the
    mean. kvpress' form takes rows from the flat ranking only where a head would fall below.

    Attributes:
        alpha_safeguard: Share of the uniform budget that each head has for its own best rows; with
            1, heads share nothing.
    """

    ragged: ClassVar[bool] = True
    needs_shared_heads: ClassVar[bool] = True

    alpha_safeguard: float = attrs.field(
        default=0.2, validator=[instance_of((int, float)), ge(0), le(1)]
    )

    @property
    def no_effect(self) -> str | None:
        """Nothing is left to share, if each head has all of the uniform budget."""
        return (
            "with alpha_safeguard = 1, heads share nothing" if self.alpha_safeguard == 1 else None
        )

    @hookimpl
    def select(self, scores: Tensor, positions: Tensor, budget: int, heads: str) -> Tensor | None:
        """Keep the best rows of each head up to the safeguard, then the best of all heads."""
        if heads == "own":
            return None
        num_heads, num_rows = scores.shape[1:]
        num_safe = min(max(int(budget * self.alpha_safeguard), 1), num_rows)
        present = positions >= 0
        # Sorts are stable, so with the newest row first it is first of equal ones, too.
        best_first = scores.flip(2).argsort(dim=2, descending=True, stable=True)
        safe = num_rows - 1 - best_first[:, :, :num_safe]
        raised = scores.scatter(2, safe, torch.inf).masked_fill(~present, -torch.inf).flatten(1)
        newest_first = positions.flatten(1).argsort(dim=1, descending=True, stable=True)
        order = raised.gather(1, newest_first).argsort(dim=1, descending=True, stable=True)
        kept = newest_first.gather(1, order[:, : budget * num_heads])
        mask = torch.zeros_like(raised, dtype=torch.bool).scatter_(1, kept, True)
        return mask.reshape(scores.shape) & present
