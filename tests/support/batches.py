"""Left-padded batches for transformers, and the tokens that `generate` adds to them."""

from typing import Any

import torch
from torch import Tensor

from kvpolicy.compat import cache_argument

PAD = 0


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """Prompts in one batch, padded on the left."""
    width = max(map(len, prompts))
    pads = [width - len(prompt) for prompt in prompts]
    rows = zip(prompts, pads, strict=True)
    return {
        "input_ids": torch.tensor([[PAD] * num + prompt for prompt, num in rows]),
        "attention_mask": torch.tensor(
            [[0] * num + [1] * (width - num) for num in pads], dtype=torch.int64
        ),
    }


def generated_tokens(
    model: Any, prompts: list[list[int]], num: int, past_key_values: Any = None, **options: Any
) -> list[list[int]]:
    """The tokens that ``model.generate`` adds to each of several prompts.

    It takes a cache under one name, whatever this release of transformers calls it.
    """
    if past_key_values is not None:
        options |= cache_argument(past_key_values)
    inputs = padded(prompts)
    settings = {"do_sample": False, "max_new_tokens": num, "pad_token_id": PAD}
    answer = model.generate(**inputs, **(settings | options))
    return answer[:, inputs["input_ids"].shape[1] :].tolist()
