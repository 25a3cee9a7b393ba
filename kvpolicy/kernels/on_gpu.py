"""Where Triton's kernels run: on tensors of a CUDA device, if Triton is installed."""

from importlib.util import find_spec

from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def runs_in_triton(tensor: Tensor) -> bool:
    """Whether Triton's kernels can read and change a tensor."""
    return HAS_TRITON and tensor.is_cuda
