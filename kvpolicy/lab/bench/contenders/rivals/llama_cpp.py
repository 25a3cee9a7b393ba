"""llama.cpp, as a rival, by its Python package: full cache, one stream of rows for each sequence.

The model is written as a GGUF file: in its own precision, with rows likewise, and for the form
``bf16`` with products in bfloat16 and rows in fp16, its usual ones. Prompts are prefilled.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError
from kvpolicy.extras import install_extra
from kvpolicy.lab.bench.contenders.contender import LLAMA_CPP as NAME
from kvpolicy.lab.bench.contenders.rivals.rival import Rival, Room, beside, common_environment

_MOST_HELD = 2048  # a prefill of more takes minutes in every round
_FILE_TYPES = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}
_OF_FORMS = {"bf16": torch.bfloat16}


def _arguments(
    model: PreTrainedModel, forms: Sequence[str], folder: Path, room: Room
) -> dict[str, Any]:
    files = {}
    for form in forms:
        dtype = _OF_FORMS.get(form, model.dtype)
        files[form] = {
            "path": str(folder / f"model-{form}.gguf"),
            "rows": "F32" if dtype == torch.float32 else "F16",
        }
        write_gguf(model, Path(files[form]["path"]), dtype)
    return {
        "files": files,
        "tokens": room.most_tokens,
        "batch": room.batch,
        "threads": torch.get_num_threads(),
    }


def write_gguf(model: PreTrainedModel, path: Path, dtype: torch.dtype) -> None:
    """Write a decoder of the Llama or Qwen3 family as a GGUF file without a vocabulary.

    Args:
        model: The model.
        path: Where to.
        dtype: Precision of its matrices; vectors are in fp32.

    Raises:
        KVPolicyError: The model is of another family or kind, or the package gguf is missing.
    """
    config = model.config
    kinds = {"llama": "LLAMA", "qwen3": "QWEN3"}
    scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in kinds or scaled != "default":
        msg = (
            f"llama.cpp is measured with models of the families {' and '.join(kinds)} with plain "
            f"rotary embeddings, and {type(model).__name__} is another one; leave out "
            "--llama-cpp-python"
        )
        raise KVPolicyError(msg)
    if find_spec("gguf") is None:
        msg = (
            "a model is written for llama.cpp with the package gguf, which is not installed: "
            f"{install_extra('gguf')}"
        )
        raise KVPolicyError(msg)
    import gguf

    name = config.model_type
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, kinds[name]), config.num_hidden_layers
    )
    writer = gguf.GGUFWriter(path, name)
    writer.add_file_type(getattr(gguf.LlamaFileType, _FILE_TYPES[dtype]))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for full, weight in model.state_dict().items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(full, try_suffixes=(".weight", ".bias"))
        if stored is None:
            msg = f"llama.cpp has no place for the weight {full}; leave out --llama-cpp-python"
            raise KVPolicyError(msg)
        rows = weight.detach().float()
        if name == "llama":
            rows = _in_pairs(full, rows, config)
        if rows.ndim == 1:
            writer.add_tensor(stored, rows.numpy())
        elif dtype == torch.bfloat16:
            bits = rows.to(dtype).view(torch.int16).numpy().view("uint8")
            writer.add_tensor(stored, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(stored, rows.to(dtype).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_pairs(name: str, weight: Tensor, config: Any) -> Tensor:
    """Channels that are rotated together, next to each other, as llama.cpp's Llama has them."""
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape).contiguous()


LLAMA_CPP: Final = Rival(
    NAME,
    "--llama-cpp-python",
    beside("llama_cpp_worker.py"),
    _arguments,
    common_environment,
    forms=("bf16",),
    most_held=_MOST_HELD,
)
