"""The backend of GPUs, where Triton is installed."""

from functools import partial

from kvpolicy.attention.base import Compact, Decode, DecodeLayer
from kvpolicy.attention.torch_backend.backend import FixedShapesBackend
from kvpolicy.attention.triton_backend.compact import compact
from kvpolicy.attention.triton_backend.decode import store_and_attend


class TritonBackend(FixedShapesBackend):
    """Decodes in Triton, and moves rows within their slabs."""

    compact: Compact | None = staticmethod(compact)

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend to the rows that are held, whose number is read on the device.

        The kernels take heads of one size; where those of values have another, whole slabs are
        attended to in torch.
        """
        if layer.is_plain and layer.keys.shape[3] != layer.values.shape[3]:
            return super().bind(layer)
        return partial(store_and_attend, layer)
