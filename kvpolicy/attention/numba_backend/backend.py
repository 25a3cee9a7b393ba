"""The backend of CPUs where Numba is installed and can be used."""

from kvpolicy.attention.base import Decode, DecodeLayer
from kvpolicy.attention.torch_backend.backend import TorchBackend


class NumbaBackend(TorchBackend):
    """Decodes in Numba. Numba is imported when a layer is bound, as that takes a second."""

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend in one call for a layer, in which each held row is read once."""
        from kvpolicy.numba_common import can_run

        if can_run():
            from kvpolicy.attention.numba_backend.decode import NumbaLayer

            return NumbaLayer(layer)
        return super().bind(layer)
