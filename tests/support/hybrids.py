"""A tiny random model of every family whose layers have states of fixed size."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from families import model_of
from transformers import CONFIG_MAPPING, PreTrainedModel

_LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_CONV = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
}
_MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4}

_LATENT = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "topk_group": 1,
}

#: Names of the families and the fields of their configurations other than sizes.
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": _CONV,
    "qwen3_next": _LINEAR,
    "bamba": _MAMBA2 | {"attn_layer_indices": [1, 3]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "granitemoehybrid": _MAMBA2
    | {"layer_types": ["linear_attention", "full_attention"] * 2, "shared_intermediate_size": 16},
    "jamba": _MAMBA
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "bailing_hybrid": _LATENT | {"q_lora_rank": None, "n_group": 1},
    "kimi_linear": _LATENT,
    "lfm2_moe": _CONV | {"num_dense_layers": 1},
    "lfm3": _CONV,
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba", "attention", "mlp"],
        "num_hidden_layers": 6,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 4,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "zamba": _MAMBA
    | {
        "num_hidden_layers": 6,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "chunk_size": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}

#: Those that run in every test run; the others are slow.
QUICK = ("lfm2", "qwen3_next")

FAMILIES_WITH_STATES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in HYBRIDS
    if name in CONFIG_MAPPING  # a release may be older than a family
]


@lru_cache(maxsize=32)
def hybrid_model(family: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of `HYBRIDS` whose tokens vary and depend on the whole prompt."""
    model = model_of(family, **({"num_hidden_layers": 4} | HYBRIDS[family]))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others do not support double precision
    return model.to(dtype)
