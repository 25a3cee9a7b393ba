"""The backend of CPUs in fp32, where Numba is installed and can be used."""

from functools import cache
from importlib.util import find_spec

from kvpolicy.attention.base import Decode, DecodeLayer
from kvpolicy.attention.torch_backend.backend import TorchBackend


class NumbaBackend(TorchBackend):
    """Decodes in Numba. Numba is imported when a layer is bound, as that takes a second."""

    def bind(self, layer: DecodeLayer) -> Decode:
        """Attend in one call for a layer, in which each held row is read once."""
        if not (layer.is_plain and can_attend()):
            return super().bind(layer)
        from kvpolicy.attention.numba_backend.decode import NumbaLayer

        return NumbaLayer(layer)


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
