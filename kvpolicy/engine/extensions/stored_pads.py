"""Stored pads: those of prompts that enter together take up rows, as in a cache that pads them."""

from collections import abc

from kvpolicy.engine.extensions.base import Extension
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.plan.resolved import LayerPlan


class StoredPads(Extension):
    """Subtracts rows for the pads of a group, for plans that study stored padding."""

    def __init__(self, layers: abc.Sequence[LayerPlan]) -> None:
        """Take what each layer does."""
        self._most = [layer.num_spare_rows for layer in layers]

    def admit(self, group: abc.Sequence[Sequence]) -> None:
        """Count the pads of each prompt."""
        longest = max(len(seq.prompt) for seq in group)
        for seq in group:
            num_pads = longest - len(seq.prompt)
            self.cache.num_reserved[:, seq.slot] = [min(num_pads, most) for most in self._most]
