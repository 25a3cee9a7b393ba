"""The difference of two means, gathered batch by batch."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.lab.steer.hidden_states import States
from kvpolicy.lab.steer.rules import EXECUTION

_SPREAD_SAMPLE = 2_048  # states kept of each side; more would only sharpen the spread


@attrs.define(eq=False)
class _Side:
    """The states before thoughts of one side, in one layer."""

    total: Tensor | float = 0.0  # [M], fp64
    count: int = 0
    sample: list[Tensor] = attrs.field(factory=list)

    def add(self, states: Tensor) -> None:
        room = max(_SPREAD_SAMPLE - self.count, 0)
        self.total = self.total + states.double().sum(dim=0)
        self.count += len(states)
        self.sample.append(states[:room].clone())

    @property
    def mean(self) -> Tensor:
        assert isinstance(self.total, Tensor)
        return self.total / self.count


class Contrast:
    """Means of the states before execution thoughts and before all others, layer by layer."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._sides = {layer: (_Side(), _Side()) for layer in layers}

    def add(self, states: States) -> None:
        """Take in the states of some thoughts."""
        is_execution = torch.tensor([kind == EXECUTION for kind in states.kinds])
        for layer, (execution, others) in self._sides.items():
            execution.add(states.by_layer[layer][is_execution])
            others.add(states.by_layer[layer][~is_execution])

    def vector(self, layer: int) -> Tensor:
        """Mean over all execution thoughts less mean over all others, ``[M]``, fp32."""
        execution, others = self._sides[layer]
        return (execution.mean - others.mean).float()

    def separation(self, layer: int) -> float | None:
        """Distance of the means over the pooled standard deviation along the vector.

        Measured on the thoughts that made the vector, so it flatters when they are few.

        Returns:
            The ratio; ``None`` if the states do not differ at all.
        """
        execution, others = self._sides[layer]
        difference = execution.mean - others.mean
        direction = difference / difference.norm()
        projected = [torch.cat(side.sample).double() @ direction for side in (execution, others)]
        residuals = torch.cat([values - values.mean() for values in projected])
        spread = residuals.square().sum().div(max(len(residuals) - 2, 1)).sqrt()
        ratio = float(difference.norm() / spread)
        return ratio if torch.isfinite(torch.tensor(ratio)) else None
