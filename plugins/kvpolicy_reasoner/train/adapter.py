"""The adapter in training: SmolLM2 with PEFT's LoRA layers, of which alone the weights change."""

import copy
import os
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from kvpolicy.errors import KVPolicyError
from kvpolicy.model.gguf import readable_folder
from kvpolicy.model.installed import model_folder, registered_model
from kvpolicy.model.loading import load_model
from kvpolicy_reasoner.chat import CHAT_TEMPLATE

BASE = "smollm2"
PAD = "<|endoftext|>"

_RANK = 32
_ALPHA = 64
_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_FROZEN_SHARE = 3  # the first third of the decoder layers stays as it is, and needs no gradients


def check_adapter() -> None:
    """Check that an adapter can be trained here.

    Raises:
        KVPolicyError: SmolLM2 or PEFT is not installed.
    """
    if find_spec("peft") is None:
        msg = "an adapter is trained with PEFT, which is not installed: pip install peft"
        raise KVPolicyError(msg)
    _base_folder()


def new_adapter(seed: int) -> PreTrainedModel:
    """Load SmolLM2 with an untrained adapter.

    Args:
        seed: Random seed for the adapter; the global random state does not change.

    Returns:
        The model in float32; only the parameters of its adapter require gradients.
    """
    from peft import LoraConfig, inject_adapter_in_model

    model = copy.deepcopy(_base(_base_folder()))
    num_layers = model.config.num_hidden_layers
    config = LoraConfig(
        base_model_name_or_path=BASE,
        task_type="CAUSAL_LM",
        r=_RANK,
        lora_alpha=_ALPHA,
        target_modules=_LAYERS,
        layers_to_transform=list(range(num_layers // _FROZEN_SHARE, num_layers)),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    return model


def build_chat_tokenizer() -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer with the chat template of the reasoner.

    Returns:
        A tokenizer that pads on the left, and with another token than the one that ends a turn.
    """
    options = {"chat_template": CHAT_TEMPLATE, "padding_side": "left", "pad_token": PAD}
    tokenizer: Any = AutoTokenizer.from_pretrained(_base_folder(), **options)
    return tokenizer


def _base_folder() -> Path:
    return readable_folder(model_folder(BASE, registered_model(BASE)), BASE)


@lru_cache(maxsize=1)
def _base(folder: Path) -> PreTrainedModel:
    """SmolLM2, which is read once: every measurement of the accuracy has a model of its own."""
    model, _ = load_model(folder, dtype=torch.float32, device="cpu")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def export_adapter(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write an adapter in PEFT's format; existing files are replaced atomically.

    Args:
        model: The model with the adapter, whose parameters are stored in bfloat16.
        tokenizer: Its tokenizer.
        folder: Output folder; created if missing.
    """
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"base_model.model.{name}": value.to(torch.bfloat16).contiguous()
        for name, value in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    adapters: Any = model.peft_config
    (config,) = adapters.values()
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        save_file(weights, Path(partial) / "adapter_model.safetensors", {"format": "pt"})
        config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for file in Path(partial).iterdir():
            os.replace(file, folder / file.name)
