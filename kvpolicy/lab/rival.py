"""transformers' own ``generate`` with the full cache, timed after the first token."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList


class _FirstToken(StoppingCriteria):
    """Notes when the first token is out; never stops anything."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.seen_at = 0.0
        self._go_on = torch.zeros(batch, dtype=torch.bool, device=device)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.seen_at = self.seen_at or _now(self._go_on.device)
        return self._go_on


def generate_once(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[float, int]:
    """Generate greedily with every prompt padded on the left to the longest.

    Args:
        model: A model without an end-of-sequence token.
        prompts: Token ids.
        new_tokens: Tokens to generate for each.

    Returns:
        Seconds from the first token of the batch to the last, and bytes of the cache's keys
        and values at the end.
    """
    token_ids, mask = _pad(prompts, model.device)
    first = _FirstToken(len(prompts), model.device)
    generate: Any = model.generate
    with torch.inference_mode():
        output = generate(
            token_ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([first]),
        )
    elapsed = _now(model.device) - first.seen_at
    layers = output.past_key_values.layers
    return elapsed, sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    token_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return token_ids.to(device), mask.to(device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
