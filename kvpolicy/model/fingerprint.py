"""Fingerprints: whether what was computed with a model can be used with another one."""

import hashlib
import json
from typing import Any

import torch
from torch import nn

from kvpolicy.errors import type_name

# Numbers that are read of each parameter. A model that was trained further, or merged with an
# adapter, differs from the one before in nearly all numbers of the parameters that have changed.
_NUM_READ = 256


def model_fingerprint(model: nn.Module) -> str:
    """A hash of a model: its class, its configuration, and some numbers of every parameter.

    Weights that were freed after packing cannot be read; the name of the model stands for them.
    """
    found = hashlib.sha256(type_name(model).encode())
    config = getattr(model, "config", None)
    if config is not None:
        found.update(json.dumps(config.to_dict(), sort_keys=True, default=repr).encode())
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        found.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        found.update(_some_bytes(parameter.detach()))
    return found.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of a tokenizer, whose texts policies may read: its class and its vocabulary."""
    found = hashlib.sha256(type_name(tokenizer).encode())
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    found.update(json.dumps(sorted(vocabulary.items())).encode())
    return found.hexdigest()


def _some_bytes(parameter: torch.Tensor) -> bytes:
    num = parameter.numel()
    if not num or parameter.layout is not torch.strided:
        return b""
    step = max(num // _NUM_READ, 1)
    places = torch.arange(0, num, step, device=parameter.device)
    return parameter.take(places).cpu().contiguous().view(torch.uint8).numpy().tobytes()
