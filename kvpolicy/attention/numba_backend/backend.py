"""The backend of CPUs in fp32, where Numba is installed and can be used."""

from functools import cache
from importlib.util import find_spec

import torch

from kvpolicy.attention.base import Decode, DecodeLayer
from kvpolicy.attention.torch_backend.backend import TorchBackend


class NumbaBackend(TorchBackend):
    """Decodes in Numba. Numba is imported when a layer is bound, as that takes a second."""

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend in one call for a layer, in which each held row is read once.

        Rows of which one side only is in integers are attended to in torch.
        """
        if not can_attend():
            return super().bind(layer)
        if layer.is_plain:
            from kvpolicy.attention.numba_backend.decode import NumbaLayer

            return NumbaLayer(layer)
        in_fp32 = layer.window is None or layer.window.dtype == torch.float32
        if layer.key_bits and layer.value_bits and in_fp32:
            from kvpolicy.attention.numba_backend.integers import NumbaIntegers

            return NumbaIntegers(layer)
        return super().bind(layer)


@cache
def can_attend() -> bool:
    """Whether Numba runs with the threads of OpenMP.

    Its other threading layers would add threads beside those of torch, and the default one ends
    the process where two threads call it; a process that has started one keeps it.
    """
    import numba

    try:
        return bool(numba.threading_layer() == "omp")
    except ValueError:  # it has not started any
        numba.config.THREADING_LAYER = "omp"
        return find_spec("numba.np.ufunc.omppool") is not None
