"""The models of the bundled reasoners: 0.8 M parameter Qwen2 models, untrained or trained."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
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
from kvpolicy_reasoner.tokenizer import build_tokenizer, build_verbose_tokenizer


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


MAX_NEW_TOKENS = 1300


@torch.no_grad()
def new_verbose_model(seed: int) -> Qwen2ForCausalLM:
    """Build the reasoner with the first one's trained weights.

    Args:
        seed: Chooses the embeddings of the new words; the global random state is left as it was.

    Returns:
        The model in float32.
    """
    model = build_model(seed, build_verbose_tokenizer(), MAX_NEW_TOKENS)
    trained, _ = load_reasoner()
    parameters = dict(model.named_parameters())
    for name, value in trained.named_parameters():
        # Rows of the embedding: the first reasoner's words come first in this vocabulary too.
        parameters[name][: len(value)] = value
    return model


# Pairs of dimensions that turn fastest, and how far they reach: the logit of the token looked
# back at exceeds those of other near tokens by up to REACH ** 2 * PAIRS / sqrt(head_dim).
_PAIRS = 4
_REACH = 4.75


@torch.no_grad()
def look_back(model: Qwen2ForCausalLM) -> None:
    """Make head ``h`` of the first layer look ``h + 1`` tokens back, by its biases alone.

    RoPE turns a constant key by its position and a constant query by its own; a query that is
    turned back by ``d`` positions beforehand meets the key ``d`` tokens earlier in phase.

    Args:
        model: Weights fresh from their random initialisation; changed in place.
    """
    attention = model.model.layers[0].self_attn
    head_dim: int = attention.head_dim
    half = head_dim // 2  # transformers turns dimension i together with dimension i + half
    speeds = model.model.rotary_emb.inv_freq[:_PAIRS]
    keys = _by_head(attention.k_proj, head_dim)
    queries = _by_head(attention.q_proj, head_dim)
    keys[:, :_PAIRS] = _REACH
    for head in range(queries.shape[0]):
        back = speeds * (head + 1)
        queries[head, :_PAIRS] = _REACH * back.cos()
        queries[head, half : half + _PAIRS] = -_REACH * back.sin()


def _by_head(projection: nn.Linear, head_dim: int) -> torch.Tensor:
    """The bias of a projection as ``[H, D]``, a view."""
    assert projection.bias is not None
    return projection.bias.view(-1, head_dim)


def export_model(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, configuration and tokenizer; each file replaces its predecessor in one go.

    Args:
        model: The model; its parameters are stored in bfloat16.
        tokenizer: Its tokenizer.
        folder: Where; made if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        with no_progress_bars():
            model.bfloat16().save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for file in Path(partial).iterdir():
            os.replace(file, folder / file.name)
