"""Devices: copies for which the host does not wait, and where Triton's kernels run."""

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
HAS_NUMBA = find_spec("numba") is not None


def runs_in_triton(tensor: Tensor) -> bool:
    """Whether Triton's kernels can read and change a tensor: on a CUDA device, if it is there."""
    return HAS_TRITON and tensor.is_cuda


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one in a block; does nothing for other devices.

    Unlike torch's operations, kernels of Triton, and graphs that are captured, go to the current
    GPU, wherever their tensors are.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def has_no_numbers(device: torch.device) -> bool:
    """Whether tensors of a device have no numbers: what a GPU launches is counted there."""
    return device.type == "meta"


def upload(values: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """Numbers of the host, in an array or a tensor, as a new tensor on a device.

    A copy from ordinary memory makes the host wait until the device has done all it was given
    before; one from pinned memory does not.

    Raises:
        RuntimeError: While a CUDA graph is captured, which would copy from this memory of the host
            at every replay, whatever is there by then.
    """
    tensor = values.clone() if isinstance(values, Tensor) else torch.tensor(values)
    if torch.device(device).type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            msg = "a graph that is captured would copy from memory of the host"
            raise RuntimeError(msg)
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Download:
    """Numbers of a device that the host will read: it waits only if they are not there by then."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin to copy a tensor."""
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._copy = tensor.to("cpu")

    def read(self) -> np.ndarray:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        numbers: np.ndarray = self._copy.numpy()
        return numbers
