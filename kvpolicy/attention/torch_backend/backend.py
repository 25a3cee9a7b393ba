"""The backends in torch: one that reads row counts on the host, and one that reads nothing."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from kvpolicy.attention.base import Compact, Decode, DecodeLayer
from kvpolicy.attention.softmax import Softmax
from kvpolicy.attention.torch_backend import decode, eager, fixed_shapes


class TorchBackend:
    """Attention in torch; others inherit what they do no better. On a CPU reading is free."""

    compact: Compact | None = None

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend to the rows that are held, which are read in each step."""
        return partial(decode.store_and_attend, layer)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        softmax: Softmax,
        accumulated: Mapping[str, Tensor],
        is_real: Tensor | None = None,
    ) -> Tensor:
        """By torch's fused kernels where outputs are all that is wanted of a plain softmax."""
        if softmax.is_plain and not accumulated:
            return eager.fused(queries, keys, values, mask, scaling)
        return eager.weighted(queries, keys, values, mask, scaling, softmax, accumulated, is_real)

    def attend_beside(
        self,
        queries: Tensor,
        held: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        visible: Tensor,
        *,
        scaling: float,
        softmax: Softmax,
    ) -> Tensor:
        """By softmax weights, without a copy of the rows of the cache."""
        return eager.beside(queries, held, own, visible, scaling, softmax)


class FixedShapesBackend(TorchBackend):
    """Attention in torch on a device whose values the host does not read in a decode step."""

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend to whole slabs, and mask what is not held."""
        return partial(fixed_shapes.store_and_attend, layer)
