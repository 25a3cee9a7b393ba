"""No stride of a library's result is assumed: attention on a GPU lies otherwise than on a CPU."""

from typing import Any

import pytest
import torch
from batches import generated_tokens
from tiny import shared_model, tiny_tokenizer
from torch import Tensor
from torch.nn import functional as F

from kvpolicy import Engine, Plan, PolicyCache

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [2, 7, 1, 8] * 4]
POLICIES = ("full", "snapkv", "rkv", "expected_attention", "skipkv")


def answers(policy: str) -> list[list[list[int]]]:
    """Tokens by the engine, one by one and in a batch, and by `generate`."""
    # Precision that Numba leaves to torch.
    model, tokenizer = shared_model(dtype=torch.float64), tiny_tokenizer()
    plan = Plan.uniform(policy, budget=12, buffer=6) if policy != "full" else Plan.uniform("full")
    options = {"max_new_tokens": 14, "stop_ids": ()}
    found = []
    for slots in (1, 2):
        engine = Engine(model, tokenizer, plan, slots=slots)
        found.append([list(one.tokens) for one in engine.generate(PROMPTS, **options).results()])
    cache = PolicyCache(model, plan, tokenizer)
    return [*found, generated_tokens(model, PROMPTS, 14, past_key_values=cache)]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_attention_of_any_stride_gives_the_same_tokens(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(policy)
    attention = F.scaled_dot_product_attention

    def transposed(*args: Any, **options: Any) -> Tensor:
        """As the kernels of CUDA: the heads lie within the tokens, ``[B, L, H, D]``."""
        output = attention(*args, **options)
        return output.transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", transposed)
    assert answers(policy) == expected
