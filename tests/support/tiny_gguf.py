"""Tiny Llamas in GGUF files, written by the package `gguf` as llama.cpp's converter writes them."""

from pathlib import Path

import gguf
import numpy as np
from tiny import tiny_model
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

CONTROL = ("<|end|>", "<|user|>")
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|end|>{% endif %}"
)
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tokens() -> list[str]:
    """Control tokens, one token for each byte, and two of two letters."""
    return [*CONTROL, *sorted(ByteLevel.alphabet()), "ab", "cd"]


def write_gguf(
    path: Path,
    *,
    quantisation: str = "F32",
    architecture: str = "llama",
    template: str | None = TEMPLATE,
    extra: dict[str, np.ndarray] | None = None,
    scaling: str | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Write a tiny Llama whose matrices are quantised.

    Args:
        path: The file.
        quantisation: Such as ``"Q4_1"``.
        architecture: What the file calls it.
        template: Its chat template.
        extra: Further tensors.
        scaling: What the file says of its rotary embeddings.
        seed: Of its weights.

    Returns:
        The model in float32 before it was quantised.
    """
    model = tiny_model(
        vocab=len(tokens()), head_dim=16, seed=seed, eos_token_id=0, tie_word_embeddings=False
    )
    config = model.config
    file = gguf.GGUFWriter(path, architecture)
    file.add_name("tiny")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_dimension_count(config.head_dim)
    file.add_rope_freq_base(10_000.0)
    if scaling is not None:
        file.add_string(f"{architecture}.rope.scaling.type", scaling)
    file.add_tokenizer_model("gpt2")
    file.add_token_list(tokens())
    file.add_token_types([3] * len(CONTROL) + [1] * (len(tokens()) - len(CONTROL)))
    file.add_token_merges(["a b", "c d"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(0)
    if template is not None:
        file.add_chat_template(template)
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        short = name.removesuffix(".weight")
        block = ""
        if short.startswith("model.layers."):
            _, _, number, short = short.split(".", 3)
            block = f"blk.{number}."
        if "q_proj" in short or "k_proj" in short:
            values = _interleaved(values, config.head_dim)
        stored = values
        if values.ndim == 2:
            stored = gguf.quantize(values, kind)
        is_plain = values.ndim != 2
        file.add_tensor(
            f"{block}{_NAMES[short]}.weight",
            np.ascontiguousarray(stored),
            raw_dtype=gguf.GGMLQuantizationType.F32 if is_plain else kind,
        )
    for name, values in (extra or {}).items():
        file.add_tensor(name, values)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model


def _interleaved(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a projection in llama.cpp's order, which rotates neighbouring dimensions together."""
    rows = []
    for start in range(0, len(weight), head_dim):
        for pair in range(head_dim // 2):
            rows += [weight[start + pair], weight[start + head_dim // 2 + pair]]
    return np.stack(rows)
