"""What a run has to know of a model while it is not loaded."""

from typing import Any, Protocol

import attrs
from transformers import PreTrainedModel

from kvpolicy.lab.fingerprint import fingerprint


@attrs.frozen
class ModelInfo:
    """One model, described.

    Attributes:
        name: What the user calls it.
        fingerprint: Tells it from every other model by its configuration and weights.
        device: Where it is.
        dtype: Its precision.
        num_layers: Its decoder layers.
        num_parameters: Its parameters.
    """

    name: str
    fingerprint: str
    device: str
    dtype: str
    num_layers: int
    num_parameters: int


class ModelProvider(Protocol):
    """Something that can describe models: a shelf here, or workers elsewhere."""

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Describe a model by its name, and give its tokenizer; see `ModelCache.describe`."""


def describe_model(name: str, model: PreTrainedModel) -> ModelInfo:
    """Describe a loaded model.

    Args:
        name: What the user calls it.
        model: The model.
    """
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(model),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=model.config.get_text_config(decoder=True).num_hidden_layers,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
