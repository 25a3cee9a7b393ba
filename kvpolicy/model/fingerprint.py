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


# What a configuration says of where the model comes from.
_NOT_SIZES = {"_name_or_path", "transformers_version", "architectures"}


def model_fingerprint(model: nn.Module) -> str:
    """A hash of a model: its class, its configuration, and some numbers of every parameter.

    Weights that were freed after packing cannot be read; the name of the model stands for them.
    """
    found = hashlib.sha256(type_name(model).encode())
    config = getattr(model, "config", None)
    if config is not None:
        read = {key: value for key, value in config.to_dict().items() if key not in _NOT_SIZES}
        found.update(json.dumps(read, sort_keys=True, default=repr).encode())
        if any(_is_freed(parameter) for parameter in model.parameters()):
            found.update(str(config.name_or_path).encode())
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


def _is_freed(parameter: torch.Tensor) -> bool:
    """Whether one number stands for all, as for weights that were freed after packing."""
    return parameter.numel() > 1 and not any(parameter.stride())


def _some_bytes(parameter: torch.Tensor) -> bytes:
    if (to_local := getattr(parameter, "to_local", None)) is not None:
        parameter = to_local()  # of a model that several processes share: the part of this one
    num = parameter.numel()
    if not num or parameter.layout is not torch.strided:
        return b""
    step = max(num // _NUM_READ, 1)
    places = torch.arange(0, num, step, device=parameter.device)
    return parameter.take(places).cpu().contiguous().view(torch.uint8).numpy().tobytes()
