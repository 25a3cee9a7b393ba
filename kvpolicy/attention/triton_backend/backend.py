"""The backend of GPUs, where Triton is installed."""

from functools import partial
from typing import Any

from torch import Tensor

from kvpolicy.attention.base import Compact, Decode, DecodeLayer
from kvpolicy.attention.by_weights import LARGEST_HEAD
from kvpolicy.attention.torch_backend import fixed_shapes
from kvpolicy.attention.torch_backend.backend import FixedShapesBackend
from kvpolicy.attention.triton_backend.compact import compact
from kvpolicy.attention.triton_backend.decode import store_and_attend


class TritonBackend(FixedShapesBackend):
    """Decodes in Triton, and moves rows within their slabs."""

    compact: Compact | None = staticmethod(compact)

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend to the rows that are held, whose number is read on the device.

        Where heads are large, whole slabs are attended to in torch.
        """
        return partial(_attend, layer)


def _attend(
    layer: DecodeLayer, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    is_large = max(key.shape[2], value.shape[2]) > LARGEST_HEAD
    attend = fixed_shapes.store_and_attend if is_large else store_and_attend
    return attend(layer, query, key, value, **options)
