"""Telling one model from another by what is in it, not by what it is called."""

import hashlib
import json

import torch
from torch import nn

_NOT_SAID = ("version", "transformers_version")


def fingerprint(model: nn.Module) -> str:
    """Hash a model's configuration and all its weights, as they were loaded.

    The same weights in another precision are another model: they answer differently.

    Args:
        model: A Hugging Face model.

    Returns:
        16 hexadecimal digits.
    """
    config = getattr(model, "config", None)
    settings = config.to_dict() if config is not None else {}
    # Where a model was loaded from, and by which version, does not change what it says.
    settings = {k: v for k, v in settings.items() if not k.startswith("_") and k not in _NOT_SAID}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        # An XOR over all values, computed where they are: seconds for billions of them.
        value = torch.hash_tensor(tensor.detach()).view(torch.int64).item()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {value};".encode())
    return digest.hexdigest()[:16]


def fingerprint_texts(texts: list[str]) -> str:
    """Hash texts in order.

    Args:
        texts: The texts.

    Returns:
        16 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
