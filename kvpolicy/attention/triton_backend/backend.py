"""The backend of GPUs, where Triton is installed."""

from functools import partial

from kvpolicy.attention.base import Compact, Decode, DecodeLayer
from kvpolicy.attention.torch_backend.backend import TorchBackend
from kvpolicy.attention.triton_backend.compact import compact
from kvpolicy.attention.triton_backend.decode import store_and_attend


class TritonBackend(TorchBackend):
    """Decodes in Triton, and moves rows within their slabs."""

    compact: Compact | None = staticmethod(compact)

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend to the rows that are held, whose number is read on the device."""
        return partial(store_and_attend, layer)
