"""Calls of a model with a `PolicyCache` that are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import shared_model

from kvpolicy import Plan, PolicyCache

PROMPT = torch.tensor([[3, 5, 7, 9]])


def call(tokens: torch.Tensor, **given: Any) -> object:
    """Call the model, whose cache has seen the prompt, with more tokens."""
    model = shared_model()
    cache = PolicyCache(model, Plan.uniform("h2o", budget=8, buffer=4))
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        return model(tokens, past_key_values=cache, **given)


def check(tokens: torch.Tensor) -> object:
    """Ask whether tokens continue what the cache has seen."""
    model = shared_model()
    cache = PolicyCache(model, Plan.uniform("h2o", budget=8, buffer=4))
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    cache.check_prompt(tokens)
    return None


CASES: dict[str, Callable[[Path], object]] = {
    "prompts beside the slabs": lambda _: PolicyCache(
        shared_model(), Plan.uniform("h2o", budget=8, buffer=4, prefill_buffer=16)
    ),
    "another batch size": lambda _: call(torch.tensor([[3], [5]])),
    "a mask that is too short": lambda _: call(PROMPT[:, :1], attention_mask=torch.ones(1, 3)),
    "positions that begin again": lambda _: call(
        PROMPT[:, :1], position_ids=torch.zeros(1, 1, dtype=torch.long)
    ),
    "a token beyond the vocabulary": lambda _: call(torch.tensor([[10_000]])),
    "a batch that is empty": lambda _: call(torch.zeros(0, 1, dtype=torch.long)),
    "a prompt that begins otherwise": lambda _: check(torch.cat([PROMPT + 1, PROMPT], 1)),
    "a prompt that has been seen": lambda _: check(PROMPT),
}
