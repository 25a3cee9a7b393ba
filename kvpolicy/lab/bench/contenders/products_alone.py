"""A model's products alone, as a contender: what a step spends on reading and multiplying weights.

What the model alone takes beyond them goes into norms, activations, attention of a token to itself,
and Python.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy.lab.bench.contenders.contender import PRODUCTS_ALONE, Contender, Measurement
from kvpolicy.lab.bench.timing import durations, synchronized_time
from kvpolicy.lab.bench.workload import Decode, Text

_NUM_STEPS = 64  # all steps take the same time


def products_alone(model: PreTrainedModel) -> Contender:
    """All linear layers of a model, each on a row of every sequence, one after the other.

    Args:
        model: The model, whose weights may be packed.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]

    @torch.inference_mode()
    def run(work: Decode | Text) -> Measurement:
        batch = len(work.prompts(model.config.vocab_size))
        # Layers that share a product are given one input, as in the model.
        inputs: dict[int, Tensor] = {
            size: torch.randn(batch, 1, size).to(model.device, model.dtype)
            for size in {layer.in_features for layer in layers}
        }
        most_steps = work.steps if isinstance(work, Decode) else work.new_tokens
        times = []
        for _ in range(min(most_steps, _NUM_STEPS) + 2):
            for layer in layers:
                layer(inputs[layer.in_features])
            times.append(synchronized_time(model.device))
        return Measurement(durations(times[1:]), kv_bytes=0, read_bytes=0)

    return Contender(PRODUCTS_ALONE, run, run, references={}, has_cache=False)
