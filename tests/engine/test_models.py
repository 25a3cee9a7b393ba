"""Every model either gives what ``generate`` gives, or is refused with a sentence."""

from typing import Any

import pytest
import torch
from tiny import greedy_tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from kvpolicy import Engine, Plan
from kvpolicy.errors import ModelError

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6]


def model_of(kind: str, **changes: Any) -> nn.Module:
    """A tiny random model of any architecture of transformers."""
    known = AutoConfig.for_model(kind).to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    config = AutoConfig.for_model(kind, **(sizes | changes))
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return auto.from_config(config).float().eval()


ALL_FULL = {"layer_types": ["full_attention"] * 2}
RUN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {},
    "gemma": {},
    "gemma3_text": ALL_FULL,
    "olmo2": {},
    "granite": {},
    "gpt_neox": {},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {},
    "smollm3": {},
}


@pytest.mark.parametrize("kind", RUN)
def test_a_model_that_is_run_equals_generate(kind: str) -> None:
    model = model_of(kind, **RUN[kind])
    engine = Engine(model, plan=Plan.uniform("h2o", budget=64), slots=2, chunk=5)
    results = engine.generate(PROMPTS, max_new_tokens=10).results()
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.tokens) == greedy_tokens(model, prompt, 10)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "t5": ({}, "encoder-decoder"),
    "mamba": ({"num_hidden_layers": 1}, "attention heads"),
    "gpt2": ({"n_embd": 32, "n_layer": 1, "n_head": 4}, "decoder layers"),
    "doge": ({"keep_window_size": 4}, "masks"),
    "stablelm": ({}, "arguments"),
    "jetmoe": ({}, "key heads"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_be_run_wrongly_is_refused(kind: str) -> None:
    changes, says = REFUSED[kind]
    model = model_of(kind, **changes)
    with pytest.raises(ModelError, match=says):
        Engine(model, plan=Plan.uniform("h2o", budget=64)).generate([[1, 2]]).results()
