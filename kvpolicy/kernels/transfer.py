"""Copies from the host to a device for which the host does not wait."""

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray, device: torch.device | str) -> Tensor:
    """Numbers of the host as a new tensor on a device.

    A copy from ordinary memory makes the host wait until the device has done all it was given
    before; one from pinned memory does not.
    """
    tensor = torch.tensor(values)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
