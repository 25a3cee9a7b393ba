"""The full cache: every token stays. The reference run."""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False)
class Full:
    """Full cache: every token stays, the reference run.

    The slab is as long as the sequence can become; budget and buffer are not used. Costs
    ``2 * layers * H_kv * D * bytes`` per token.
    """

    bounded: ClassVar[bool] = False

    @hookimpl
    def due(self, num_rows: Tensor) -> Tensor:
        """Never compact."""
        return torch.zeros_like(num_rows, dtype=torch.bool)
