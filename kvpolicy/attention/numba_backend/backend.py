"""The backend of CPUs in fp32, where Numba is installed and can be used."""

import torch

from kvpolicy.attention.base import Decode, DecodeLayer
from kvpolicy.attention.torch_backend.backend import TorchBackend


class NumbaBackend(TorchBackend):
    """Decodes in Numba. Numba is imported when a layer is bound, as that takes a second."""

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend in one call for a layer, in which each held row is read once.

        Rows of which one side only is in integers are attended to in torch.
        """
        from kvpolicy.numba_common import can_run

        if not can_run():
            return super().bind(layer)
        if layer.is_plain:
            from kvpolicy.attention.numba_backend.decode import NumbaLayer

            return NumbaLayer(layer)
        in_fp32 = layer.window is None or layer.window.dtype == torch.float32
        if layer.key_bits and layer.value_bits and in_fp32:
            from kvpolicy.attention.numba_backend.integers import NumbaIntegers

            return NumbaIntegers(layer)
        return super().bind(layer)
