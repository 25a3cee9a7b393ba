"""The model alone, as a contender: an upper bound on speed."""

import torch
from transformers import PreTrainedModel

from kvpolicy.lab.bench.contenders.contender import MODEL_ALONE, Contender, Measurement
from kvpolicy.lab.bench.timing import durations, synchronized_time
from kvpolicy.lab.bench.workload import Decode, Workload

_NUM_STEPS = 64  # all steps take the same time


def model_alone(model: PreTrainedModel) -> Contender:
    """The model on one token of each sequence, without a cache: an upper bound on speed.

    Each token attends to itself only, so that everything but attention over a cache is measured.
    """

    @torch.inference_mode()
    def run(work: Workload) -> Measurement:
        prompts = work.prompts(model.config.vocab_size)
        token_ids = torch.tensor([prompt[:1] for prompt in prompts], device=model.device)
        num_steps = work.steps if isinstance(work, Decode) else work.new_tokens
        times = []
        for _ in range(min(num_steps, _NUM_STEPS) + 2):
            logits = model(input_ids=token_ids, use_cache=False).logits
            token_ids = logits[:, -1].argmax(dim=-1, keepdim=True)
            times.append(synchronized_time(model.device))
        return Measurement(durations(times[1:]), kv_bytes=0, read_bytes=0)

    return Contender(MODEL_ALONE, run, run, references={}, has_cache=False)
