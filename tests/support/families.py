"""A tiny random model of every supported family, with windows of a few tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

WINDOW = 6

_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

#: Names of the families and the fields of their configurations other than sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    # The scale of the logits differs from that of the head size, and the soft cap has an effect.
    "gemma2": _ALTERNATING | {"query_pre_attn_scalar": 3, "attn_logit_softcapping": 4.0},
    "gemma3_text": _ALTERNATING | {"query_pre_attn_scalar": 20},
    "olmo2": {},
    "olmo3": _ALTERNATING,
    "mixtral": {"sliding_window": WINDOW},
    "qwen3_moe": {},
    "gpt_oss": _ALTERNATING,
}

#: Unsupported models: changes of their configuration and a part of the error message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "t5": ({}, "encoder-decoder"),
    "mamba": ({"num_hidden_layers": 1}, "attention heads"),
    "llama4_text": ({}, "chunked_attention"),
    "gpt_neo": (
        {"attention_types": [[["global"], 1]], "num_layers": 1, "num_heads": 4},
        "no list of decoder layers",
    ),
    "stablelm": ({}, "arguments"),
    "nemotron": ({}, "attention itself|arguments"),
    "jetmoe": ({}, "attends with 4 key heads, more than it stores"),
    "falcon": ({}, "computes its attention itself"),
    "minimax": ({}, "one of its own class|5.17 or newer"),
    "doge": ({"keep_window_size": 4}, "masks"),
}

#: Families with sliding windows.
WINDOWED = [name for name, changes in FAMILIES.items() if "sliding_window" in changes]

#: Norms, rotations, gates and joint products of two layers that become one operator each.
FUSED = {
    "llama": (5, 2, 2, 4),
    "mistral": (5, 2, 2, 4),
    "qwen2": (5, 2, 2, 4),
    "qwen3": (9, 2, 2, 4),
    "olmo2": (9, 2, 2, 4),
    "olmo3": (9, 2, 2, 4),
    "phi3": (5, 2, 2, 0),  # its weights are joined already
    "gemma2": (0, 2, 0, 4),
    "gemma3_text": (0, 2, 0, 4),
}
#: Their norms and rotations compute in fp32, and round elsewhere than ours.
FUSED_IN_HALF = {"olmo2": (0, 0, 2, 4), "olmo3": (0, 0, 2, 4)}


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
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


def model_of(kind: str, **changes: Any) -> PreTrainedModel:
    """A tiny random model of a family with transformers' eager attention."""
    known = AutoConfig.for_model(kind).to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    config = AutoConfig.for_model(kind, **(sizes | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # Eager, because releases before 5.23 run Gemma-2 with a kernel that omits its soft cap.
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        return auto.from_config(config, attn_implementation="eager").float().eval()


@lru_cache(maxsize=32)
def family_model(
    family: str, *, window: int = WINDOW, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model of `FAMILIES` whose tokens vary and depend on the whole prompt."""
    changes = FAMILIES[family]
    model = model_of(family, **(changes | ({"sliding_window": window} if changes else {})))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(
            "eager"
        )  # grouped products do not support double precision
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            # Normalised heads attend almost uniformly, so every prompt would get the same tokens.
            weight.data.add_(1.0)
        if name.endswith("embed_tokens.weight") and "gemma" in family:
            weight.data.div_(model.config.hidden_size**0.5)
        if name.endswith("sinks"):
            weight.data.mul_(3.0)
    return model.to(dtype)


@contextmanager
def attention_implementation(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Switch a model to a registered attention function of transformers."""
    before = model.config._attn_implementation
    model.config._attn_implementation = attention
    try:
        yield
    finally:
        model.config._attn_implementation = before
