"""Tiny random models of any class of transformers, made from its configuration alone.

Sizes are set wherever a configuration has a field of that name, in its parts, too; every kind of
layer that the class has by default is in the tiny one. What one class needs beyond that is said in
`NEEDS`.
"""

import inspect
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from kvpolicy.compat import layer_configs

VOCAB = 61
POSITIONS = 256

# Of a decoder, or of any part that is not for images or sound.
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "d_ff": 64,
    "n_inner": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "multi_query_group_num": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "n_positions": POSITIONS,
    "max_seq_len": POSITIONS,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "embedding_size": 32,
    "sliding_window": 6,
    "attention_window": 6,
    "attention_chunk_size": 6,
    # Experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    # Latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 8,
    # States of fixed size
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_head_dim": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "attention_hidden_size": 32,
    "lru_width": 32,
    "block_dim": 32,
    "block_ff_dim": 64,
    # Other parts
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "dropout": 0.0,
    "initializer_range": 0.4,
    "is_decoder": True,
}

# Of what sees or hears.
_ENCODER = {
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "ffn_dim": 32,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "depth": 1,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_attention_heads": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "num_global_layers": 1,
    "vocab_size": VOCAB,
}

_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
_MROPE_HALF = {
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.5,
    }
}
_MLA_HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "head_dim": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
# The last four layers attend to the keys and values of the first two.
_SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 4,
}

#: Fields that a class needs beyond the sizes, by its model type; those of a part by its name.
NEEDS: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "blt_local_encoder": {"encoder_hash_byte_group_vocab": 101},
    "chameleon": {"vocabulary_map": {"<image>": 60}},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dots3_note_text": {
        "num_hidden_layers": 4,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        **{f"swa_{name}": size for name, size in _MLA_HEADS.items()},
        "head_dim": 12,
        "num_key_value_heads": 4,
    },
    "emu3": {"vocabulary_map": {"<image>": 60}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {"rope_type": "ernie_3d", "rope_theta": 5e5, "mrope_section": [1, 1, 2]},
    },
    "gemma3n_text": _SHARED | {"activation_sparsity_pattern": None, "intermediate_size": 64},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gemma4_text": _SHARED | {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "glm46v_text": _MROPE_HALF,
    "glm4v_text": _MROPE_HALF,
    "glm4v_moe_text": _MROPE_HALF,
    "glm_ocr_text": _MROPE_HALF,
    "glm5_next_text": {"index_topk": 32, "qk_rope_head_dim": 0},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
    },
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "hunyuan_vl_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1, 1]}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0], "text_hidden_size": 32}},
    "paddleocr_vl_text": _MROPE,
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    # Their masks have no window, or their attention is not told of it; checkpoints have none.
    "phimoe": {"sliding_window": None},
    "qwen3_omni_moe_text": {"sliding_window": None},
    "qwen3_vl_moe_text": {"sliding_window": None},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "num_hidden_layers": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"num_hidden_layers": 6},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "zamba": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_hidden_layers": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

_SEEING = ("vision", "image", "visual", "audio", "speech", "sam", "vq", "codec", "encoder_config")


def causal_classes() -> dict[str, str]:
    """Every class of a decoder of text, by the type of its model."""
    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def vision_language_classes() -> dict[str, str]:
    """Every class that gives text for images, sound or video, and text."""
    found = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return found | dict(getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}))


@cache
def classes() -> dict[str, str]:
    """The type of the model of every class that gives text, by the name of the class."""
    import transformers

    names = [*causal_classes().values(), *vision_language_classes().values()]
    names += [name for name in dir(transformers) if name.endswith("ForCausalLM")]
    found = {}
    for name in dict.fromkeys(names):
        model_class = getattr(transformers, name, None)
        if getattr(model_class, "config_class", None) is not None:
            found[name] = model_class.config_class.model_type
    return found


def tiny_config(
    config_class: type[PretrainedConfig],
    needs: Mapping[str, Any] | None = None,
    *,
    seeing: bool = False,
) -> PretrainedConfig:
    """A tiny configuration of a class.

    Args:
        config_class: The class.
        needs: Fields that it is to have; default: those of `NEEDS`.
        seeing: Whether it is of a part that sees or hears.
    """
    needs = NEEDS.get(config_class.model_type, {}) if needs is None else needs
    default = config_class()
    known = set(vars(default)) | set(inspect.signature(config_class.__init__).parameters)
    known |= set(config_class.attribute_map)
    sizes = _ENCODER if seeing else _TEXT
    given = {name: size for name, size in sizes.items() if name in known}
    parts = {}
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            sees = seeing or any(word in name for word in _SEEING)
            own = {**NEEDS.get(part.model_type, {}), **needs.get(name, {})}
            parts[name] = tiny_config(type(part), own, seeing=sees)
    if _has_latents(default):  # every head has keys of its own
        given = {name: size for name, size in given.items() if name != "head_dim"}
        given["num_key_value_heads"] = given.get("num_attention_heads")
    given |= _layer_kinds(config_class, default) | _rope(default)
    given |= {name: value for name, value in needs.items() if name not in parts} | parts
    return config_class(**given)


def _has_latents(config: PretrainedConfig) -> bool:
    """Whether a configuration is one of latent attention; its layers may have different sizes."""
    layers = layer_configs(config) if getattr(config, "is_heterogeneous", False) else [config]
    return any(getattr(one, "kv_lora_rank", None) for one in layers)


def _layer_kinds(config_class: type[PretrainedConfig], default: PretrainedConfig) -> dict[str, Any]:
    """Layers of every kind that a configuration has by default, in two rounds."""
    kinds = getattr(default, "layer_types", None)
    attribute = config_class.attribute_map.get("layer_types", "layer_types")
    if not kinds or isinstance(getattr(config_class, attribute, None), property):
        return {}
    rounds = list(dict.fromkeys(kinds)) * 2
    return {"layer_types": rounds, "num_hidden_layers": len(rounds)}


def _rope(default: PretrainedConfig) -> dict[str, Any]:
    """The rotary embedding, where its sections belong to a size of heads."""
    parameters = getattr(default, "rope_parameters", None) or {}
    sections = parameters.get("mrope_section")
    if not sections:
        return {}
    pairs = int(_TEXT["head_dim"] * (parameters.get("partial_rotary_factor") or 1)) // 2
    least = pairs // len(sections)
    fitting = [pairs - least * (len(sections) - 1)] + [least] * (len(sections) - 1)
    return {"rope_parameters": {**parameters, "mrope_section": fitting}}


def tiny_random_model(class_name: str, config: PretrainedConfig | None = None) -> PreTrainedModel:
    """A tiny model whose tokens vary and depend on the whole prompt; it ends no generation."""
    import transformers

    model_class = getattr(transformers, class_name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = tiny_config(model_class.config_class) if config is None else config
        model = model_class._from_config(config, attn_implementation="eager")
        for name, weight in model.named_parameters():
            _vary(name, weight.data)
    model = model.float().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for part in (model.config, model.config.get_text_config(decoder=True)):
        vars(part)["eos_token_id"] = None
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def _vary(name: str, weight: torch.Tensor) -> None:
    """Large random weights: a model that repeats itself would hide most defects of a cache."""
    if not weight.is_floating_point():
        return
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        weight.add_(1.0)  # normalised heads attend almost uniformly
    elif weight.dim() == 2 and name.endswith("weight"):
        # The sigmoids of a router must not be 1 for several experts.
        size = 0.5 if re.search(r"router|\bgate\.", name) else 2
        weight.normal_(std=size / math.sqrt(weight.shape[1]))
    elif weight.dim() == 3 and "experts" in name:
        weight.normal_(std=2 / math.sqrt(weight.shape[-1]))
