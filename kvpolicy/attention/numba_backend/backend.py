"""The backend of CPUs in fp32, where Numba is installed and can be used."""

import torch

from kvpolicy.attention.base import Decode, DecodeLayer
from kvpolicy.attention.torch_backend.backend import TorchBackend


class NumbaBackend(TorchBackend):
    """Decodes in Numba. Numba is imported when a layer is bound, as that takes a second."""

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend in one call for a layer, in which each held row is read once."""
        from kvpolicy.numba_common import can_run

        sides = (layer.keys, layer.key_bits), (layer.values, layer.value_bits)
        numbers = [slab for slab, bits in sides if not bits]
        others = layer.window, layer.exact_keys, layer.exact_values
        numbers += [one for one in others if one is not None]
        if can_run() and all(one.dtype == torch.float32 for one in numbers):
            from kvpolicy.attention.numba_backend.decode import NumbaLayer

            return NumbaLayer(layer)
        return super().bind(layer)
