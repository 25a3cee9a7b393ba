"""The bundled reasoners: 0.8 M parameter Qwen2 models, untrained or loaded from a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging

from kvpolicy.errors import ModelError
from kvpolicy.model.loading import InstalledModel
from kvpolicy_reasoner import REASONER_VERBOSE, bundled_path
from kvpolicy_reasoner.lookback import look_back
from kvpolicy_reasoner.tokenizer import build_tokenizer


def reasoner() -> InstalledModel:
    """The first reasoner; its weights are stored in bfloat16 to be small, and run in float32."""
    return InstalledModel(bundled_path(), dtype="float32")


def reasoner_verbose() -> InstalledModel:
    """The second reasoner, likewise."""
    return InstalledModel(bundled_path(REASONER_VERBOSE), dtype="float32")


def load_reasoner(
    folder: Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a trained reasoner for evaluation, in float32.

    Args:
        folder: A folder that training exported; the bundled one if not given.

    Returns:
        The model and its tokenizer.

    Raises:
        ModelError: The folder holds no model.
    """
    folder = bundled_path() if folder is None else folder
    if not (folder / "config.json").is_file():
        msg = (
            f"no trained reasoner in {folder}; expected a folder with config.json,"
            " model.safetensors and tokenizer.json, as 'kvpolicy reasoner train' writes it."
        )
        raise ModelError(msg)
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silence transformers' progress bars, which outlive a model of this size."""
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def new_model(seed: int) -> Qwen2ForCausalLM:
    """Build the reasoner with untrained weights.

    Args:
        seed: Chooses the weights; the global random state is left as it was.

    Returns:
        The model in float32.
    """
    model = build_model(seed, build_tokenizer(), max_new_tokens=700)
    look_back(model)
    return model


def build_model(
    seed: int, tokenizer: PreTrainedTokenizerFast, max_new_tokens: int
) -> Qwen2ForCausalLM:
    """Build a model of the reasoners' size with plain random weights.

    Args:
        seed: Chooses the weights; the global random state is left as it was.
        tokenizer: The tokenizer; its size is the vocabulary's.
        max_new_tokens: Where its generations are cut off by default.

    Returns:
        The model in float32.
    """
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        **tokens,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, **tokens
    )
    return model
