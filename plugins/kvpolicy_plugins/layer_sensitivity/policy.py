"""Budgets of layers by how much their keys change when a text is prefilled in blocks."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import attrs
from attrs.validators import ge, in_, instance_of, le, optional

from kvpolicy import hookimpl
from kvpolicy.toolkit import (
    LayerTableError,
    largest_remainder,
    layer_table_with_hash,
    load_layer_table,
)

_ALPHA_OF_PAPER = 2.0
_ALPHA_OF_CODE = 1.1


@attrs.define(eq=False, kw_only=True)
class LayerSensitivity:
    """EpiCache's budgets of layers: more rows where block prefill changes the keys more.

    Kim et al., "EpiCache: Episodic KV Cache Management for Long Conversational Question
    Answering", 2025 (arXiv 2509.17396); code at apple/ml-epicache b742661. A table has for each
    layer the sensitivity ``s = 1 - sigma``, where ``sigma`` is the mean cosine between the
    keys of a full causal forward and those of a forward in blocks; `kvpolicy layers
    measure` makes one. Layer ``l`` of ``L`` gets ``s_l^alpha / sum(s^alpha) * L * M`` rows, where
    ``M`` is the budget of the plan.

    The policy only divides the budget: list it before one that scores, as in
    ``["layer_sensitivity", "h2o"]``. Alone, the newest rows of each layer stay.

    ``variant="code"`` weighs as the authors' code: sigma is scaled to 0 to 1 over the layers, and
    the weight is ``(1 - sigma)^alpha``.

    Deviations: the total is met exactly, by largest remainders; in the code, rounding and its
    lower bound give a few percent more. No layer gets less than ``least`` of the mean, 1/4 as
    in the code, also with the paper's weights: keys of the first layer do not depend on other
    tokens, so that its sensitivity is 0, and the formula alone leaves it no rows. What a layer
    gets more than its weight is taken from the others in proportion. ``sigma`` is
    that of a table with one model's texts, not of one sample of BookSum.

    Attributes:
        table: Name or path of a table, to which a hash of the contents is added; without one,
            all layers get the same.
        alpha: Exponent of the weights; 0 gives all layers the same. By default 2, and 1.1 in
            the code's variant.
        variant: ``"paper"`` or ``"code"``, see above.
        least: The least that a layer gets, a share of the mean budget; 0 for the formula alone.
    """

    ragged: ClassVar[bool] = True

    table: str | None = attrs.field(
        default=None,
        validator=optional(instance_of(str)),
        converter=layer_table_with_hash,
    )
    alpha: float | None = attrs.field(
        default=None,
        validator=optional([instance_of((int, float)), ge(0), le(100)]),  # type: ignore[arg-type]
    )
    variant: Literal["paper", "code"] = attrs.field(
        default="paper", validator=in_(["paper", "code"])
    )
    least: float = attrs.field(default=0.25, validator=[instance_of((int, float)), ge(0), le(1)])

    @property
    def no_effect(self) -> str | None:
        """All layers get the same without a table, or with weights that do not depend on it."""
        if self.table is None:
            return 'it has no table; give it one of `kvpolicy layers measure`, table = "NAME"'
        return "with alpha = 0, all layers get the same" if self.alpha == 0 else None

    @hookimpl
    def allocate(
        self,
        layer_indices: Sequence[int],
        budget: int,
        total: int,
        floors: Sequence[int],
        num_layers: int,
    ) -> list[int]:
        """Divide the rows by the layers' sensitivities."""
        sensitivities = self._sensitivities(num_layers)
        weights = self.weights([sensitivities[layer_idx] for layer_idx in layer_indices])
        least = int(self.least * budget)
        # Rows that policies protect come first, where both do not fit.
        while sum(max(floor, least) for floor in floors) > total:
            least -= 1
        return divide(total, weights, [max(floor, least) for floor in floors])

    def weights(self, sensitivities: Sequence[float]) -> list[float]:
        """The weight of each layer of a group.

        Args:
            sensitivities: ``1 - sigma`` of each layer.
        """
        if self.variant == "paper":
            alpha = _ALPHA_OF_PAPER if self.alpha is None else self.alpha
            return [max(one, 0.0) ** alpha for one in sensitivities]
        alpha = _ALPHA_OF_CODE if self.alpha is None else self.alpha
        # 1 - (sigma - min sigma) / (max sigma - min sigma), in terms of s = 1 - sigma
        low, high = min(sensitivities), max(sensitivities)
        if low == high:
            return [1.0] * len(sensitivities)
        return [((one - low) / (high - low)) ** alpha for one in sensitivities]

    def _sensitivities(self, num_layers: int) -> Sequence[float]:
        if self.table is None:
            return [1.0] * num_layers
        found = load_layer_table(self.table)
        if len(found.values) != num_layers:
            msg = (
                f"layer table '{self.table}' has {len(found.values)} layers and the model "
                f"{num_layers}: it was measured on {found.model}; make one for this model with "
                "`kvpolicy layers measure`"
            )
            raise LayerTableError(msg)
        return found.values


def divide(total: int, weights: Sequence[float], floors: Sequence[int]) -> list[int]:
    """Divide a total by weights, with a lower bound for each part.

    Unlike `largest_remainder`, which gives the weights what is left above the floors, parts are
    proportional to the weights wherever that is not below a floor.

    Args:
        total: Rows to divide, no fewer than the floors together.
        weights: A non-negative number for each part; if all are 0, all count the same.
        floors: The least of each part.
    """
    if not any(weights):
        weights = [1.0] * len(weights)
    # Scaling leaves the shares as they are, and keeps tiny powers from vanishing.
    weights = [weight / max(weights) for weight in weights]
    raised: set[int] = set()
    for _ in weights:  # each round but the last raises a part to its floor, which lowers the others
        rest = total - sum(floors[index] for index in raised)
        free = [index for index in range(len(weights)) if index not in raised]
        sum_free = sum(weights[index] for index in free)
        low = {
            index
            for index in free
            if sum_free == 0 or rest * weights[index] / sum_free < floors[index]
        }
        if not low or not sum_free:
            break
        raised |= low
    bounds = [floors[index] if index in raised else 0 for index in range(len(weights))]
    shares = [0.0 if index in raised else weight for index, weight in enumerate(weights)]
    return largest_remainder(total, shares, bounds)
