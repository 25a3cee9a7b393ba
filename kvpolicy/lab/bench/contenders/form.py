"""Forms of one model: as it is, with weights in a form for CPUs, with compiled decode steps.

Like stands beside like: each form has ``generate``, the model alone and the engine of its own.
"""

from functools import wraps
from typing import Any, Final, Self

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.model import static_forward
from kvpolicy.model.packed import packed_model
from kvpolicy.model.twin import Copies
from kvpolicy.model.weight_forms import CpuWeights

PACKED: Final = "packed"
COMPILED = "compiled"


@attrs.frozen(eq=False)
class Form:
    """A form of a model.

    Attributes:
        name: What it is called in names of contenders; empty for the model as it is.
        model: The model, which the engine is given.
        called: The same model for plain calls and ``generate``; its forward is compiled if the
            engine compiles its own.
    """

    name: str
    model: PreTrainedModel
    called: PreTrainedModel

    @property
    def is_compiled(self) -> bool:
        """Whether decode steps are compiled."""
        return self.name == COMPILED

    @classmethod
    def plain(cls, model: PreTrainedModel) -> Self:
        """The model as it is."""
        return cls("", model, model)

    @classmethod
    def packed(cls, model: PreTrainedModel, cpu_weights: CpuWeights = PACKED) -> Self:
        """With packed weights; its model is the one given if all its products are small."""
        packed = packed_model(model, cpu_weights=cpu_weights)
        return cls(cpu_weights, packed, packed)

    @classmethod
    def compiled(cls, model: PreTrainedModel) -> Self:
        """With decode steps that `torch.compile` compiles when they first run."""
        return cls(COMPILED, model, _compiled_steps(model))


def _compiled_steps(model: PreTrainedModel) -> PreTrainedModel:
    """A model that shares all weights, and whose forward of one token of each sequence is compiled.

    Prompts take the forward as it is, as in the engine.
    """
    twin = Copies(model, None).twin
    forward = twin.forward
    # Caches of transformers grow in every step: with fixed shapes, each would be compiled.
    step = torch.compile(forward, dynamic=True, fullgraph=True, backend=static_forward.BACKEND)

    @wraps(forward)  # `generate` looks at its parameters
    def either(input_ids: Tensor, **options: Any) -> Any:
        run = step if input_ids.shape[1] == 1 else forward
        return run(input_ids=input_ids, **options)

    vars(twin)["forward"] = either
    return twin
