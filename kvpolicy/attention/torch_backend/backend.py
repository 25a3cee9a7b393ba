"""The backends in torch: one that reads row counts on the host, and one that reads nothing."""

from functools import partial

from kvpolicy.attention.base import Compact, Decode, DecodeLayer
from kvpolicy.attention.torch_backend import decode, fixed_shapes
from kvpolicy.opaque import call_opaque


class TorchBackend:
    """Attention in torch; others inherit what they do no better. On a CPU reading is free."""

    compact: Compact | None = None

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend to the rows that are held, which are read in each step."""
        return partial(call_opaque, decode.store_and_attend, layer)


class FixedShapesBackend(TorchBackend):
    """Attention in torch on a device whose values the host does not read in a decode step."""

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend to whole slabs, and mask what is not held."""
        return partial(fixed_shapes.store_and_attend, layer)
