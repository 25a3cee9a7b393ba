"""Which backend attends: by device, precision, installed extras, and whether a graph is made."""

import torch

from kvpolicy.attention.base import AttentionBackend
from kvpolicy.attention.operator import MetaBackend, OperatorBackend, implement
from kvpolicy.attention.torch_backend.backend import FixedShapesBackend, TorchBackend
from kvpolicy.devices import HAS_NUMBA, HAS_TRITON, has_no_numbers

# Numbers, and bytes of integers.
_OF_NUMBA = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def backend_for(
    device: torch.device, dtype: torch.dtype, *, in_graph: bool = False, once: bool = False
) -> AttentionBackend:
    """The backend for keys on a device.

    Args:
        device: The device.
        dtype: Precision of the keys as they are stored.
        in_graph: Whether decode steps are traced or captured, so that they must be an operator.
        once: Whether there is one step only: to load Numba would take longer than it saves.
    """
    if in_graph:
        return OperatorBackend()
    if has_no_numbers(device):
        return MetaBackend()
    if device.type == "cuda":
        if not HAS_TRITON:
            return FixedShapesBackend()
        from kvpolicy.attention.triton_backend.backend import TritonBackend

        return TritonBackend()
    if dtype in _OF_NUMBA and HAS_NUMBA and not once:
        from kvpolicy.attention.numba_backend.backend import NumbaBackend

        return NumbaBackend()
    return TorchBackend()


implement(backend_for)
