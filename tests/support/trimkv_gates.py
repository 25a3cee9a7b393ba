"""Files of gates for tests."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor


def recorded_gate(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """The weights among the arrays of a recorded case, by the authors' names."""
    names = ("linear", "gate_proj", "up_proj", "down_proj", "bias")
    return {
        name.replace("__", "."): torch.from_numpy(array)
        for name, array in arrays.items()
        if name.startswith(names)
    }


def echo_gate(path: Path, num_heads: int) -> str:
    """A gate whose logits are the states it reads: ``silu(x) - silu(-x) = x``."""
    one = torch.eye(num_heads)
    tensors = {
        "linear1.weight": torch.cat([one, -one]),
        "linear1.bias": torch.zeros(2 * num_heads),
        "linear2.weight": torch.cat([one, -one], dim=1),
        "bias": torch.zeros(num_heads),
    }
    save_file(tensors, path)
    return str(path)


def states_for(log_beta: Tensor) -> Tensor:
    """States, ``[B, T, H_kv]``, of which `echo_gate` makes this retention, ``[B, H_kv, T]``."""
    exact = log_beta.double()
    return (exact - torch.log(-torch.expm1(exact))).float().transpose(1, 2).contiguous()
