"""The models of a sweep: what is known of one, how it is identified, and which one is loaded."""

import gc
import hashlib
import json
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from transformers import PreTrainedModel

from kvpolicy.model.loading import load_model
from kvpolicy.model.packed import CpuWeights, packed_weights
from kvpolicy.model.tensor_parallel import refuse_several_processes

# Entries of a configuration that do not change a model's output.
_IGNORED_SETTINGS = ("version", "transformers_version")


@attrs.frozen
class ModelInfo:
    """What a sweep records of a model.

    Attributes:
        name: Its name, hub id or folder, as the user typed it.
        fingerprint: Hash of its configuration and weights.
        device: Its device.
        dtype: Its precision, and whether its weights are packed.
        num_layers: Number of decoder layers.
        num_parameters: Number of parameters.
    """

    name: str
    fingerprint: str
    device: str
    dtype: str
    num_layers: int
    num_parameters: int


class ModelProvider(Protocol):
    """Describes models: a `ModelCache` in this process, or workers on a cluster."""

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Describe a model and return its tokenizer; see `ModelCache.describe`."""


@attrs.define
class ModelCache:
    """Loads models with the same options, and keeps the last one in memory.

    Attributes:
        dtype: Precision, as in `kvpolicy.model.loading.load_model`.
        device: Device, as in `load_model`.
        trust_remote_code: Whether to run code that comes with a model.
        cpu_weights: Order of the weights, as in `load_model`.
    """

    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    cpu_weights: CpuWeights = "plain"
    _name: str | None = attrs.field(default=None, init=False)
    _loaded: tuple[Any, Any] | None = attrs.field(default=None, init=False)

    def open(self, name: str) -> tuple[Any, Any]:
        """Return a model and its tokenizer, loading them if another model is in memory.

        The other model is released first, so that memory for one is enough.

        Args:
            name: Name of an installed model, hub id or local folder.

        Raises:
            ModelError: The model cannot be loaded.
        """
        if self._loaded is None or self._name != name:
            refuse_several_processes()
            self._name, self._loaded = name, None
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._loaded = load_model(
                name,
                dtype=self.dtype,
                device=self.device,
                trust_remote_code=self.trust_remote_code,
                cpu_weights=self.cpu_weights,
            )
        return self._loaded

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Describe a model, loading it if necessary, and return its tokenizer.

        Args:
            name: As for `open`.

        Raises:
            ModelError: The model cannot be loaded.
        """
        model, tokenizer = self.open(name)
        return describe_model(name, model), tokenizer


def describe_model(name: str, model: PreTrainedModel) -> ModelInfo:
    """Describe a loaded model.

    Args:
        name: Its name as the user typed it.
        model: The model.
    """
    packed = ", packed" if packed_weights(model).num_layers else ""
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(model),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch.") + packed,
        num_layers=model.config.get_text_config(decoder=True).num_hidden_layers,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def fingerprint(model: nn.Module) -> str:
    """Hash a model's configuration and all its weights.

    The name and the folder do not count. The precision does, and whether the weights are packed:
    both change answers.

    Args:
        model: A Hugging Face model.

    Returns:
        16 hexadecimal digits.
    """
    config = getattr(model, "config", None)
    settings = config.to_dict() if config is not None else {}
    settings = {
        k: v for k, v in settings.items() if not k.startswith("_") and k not in _IGNORED_SETTINGS
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        # An XOR over all values, computed on the model's device: seconds for billions of values.
        value = torch.hash_tensor(tensor.detach()).view(torch.int64).item()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {value};".encode())
    if packed_weights(model).num_layers:
        digest.update(b"packed")
    return digest.hexdigest()[:16]


def fingerprint_texts(texts: list[str]) -> str:
    """Hash texts in order.

    Args:
        texts: The texts.

    Returns:
        16 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
