"""Models of the bundled reasoners: Qwen2 with 0.8 M parameters, untrained or trained."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging

from kvpolicy.model.loading import load_model
from kvpolicy_reasoner import bundled_path
from kvpolicy_reasoner.installed import reasoner, reasoner_verbose  # noqa: F401 - older entry points
from kvpolicy_reasoner.tokenizer import build_tokenizer, build_verbose_tokenizer


def load_reasoner(
    folder: Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a trained reasoner for evaluation, in float32.

    Args:
        folder: A folder exported by training; that of the first reasoner if not given.

    Returns:
        The model and its tokenizer.

    Raises:
        ModelError: The folder does not contain a model, or is damaged.
    """
    return load_model(
        bundled_path() if folder is None else folder, dtype=torch.float32, device="cpu"
    )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which only add noise for models of this size."""
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def new_model(seed: int) -> Qwen2ForCausalLM:
    """Build the first reasoner with untrained weights.

    Args:
        seed: Random seed for the weights; the global random state does not change.

    Returns:
        The model in float32.
    """
    model = build_model(seed, build_tokenizer())
    init_previous_token_heads(model)
    return model


def build_model(seed: int, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Build a model of the reasoners' size with random weights.

    Args:
        seed: Random seed for the weights; the global random state does not change.
        tokenizer: The tokenizer, which defines the vocabulary size.

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
    # No maximum length: it would take precedence over the one that an evaluation harness gives.
    model.generation_config = GenerationConfig(do_sample=False, **tokens)
    return model


@torch.no_grad()
def new_verbose_model(seed: int) -> Qwen2ForCausalLM:
    """Build the second reasoner from the trained weights of the first.

    Args:
        seed: Random seed for embeddings of new words; the global random state does not change.

    Returns:
        The model in float32.
    """
    model = build_model(seed, build_verbose_tokenizer())
    trained, _ = load_reasoner()
    parameters = dict(model.named_parameters())
    for name, value in trained.named_parameters():
        # This vocabulary starts with that of the first reasoner, so embedding rows match.
        parameters[name][: len(value)] = value
    return model


# The dimension pairs that RoPE rotates fastest, and the size of their biases: the logit of the
# target token exceeds those of nearby tokens by up to SIZE ** 2 * PAIRS / sqrt(head_dim).
_NUM_PAIRS = 4
_BIAS_SIZE = 4.75


@torch.no_grad()
def init_previous_token_heads(model: Qwen2ForCausalLM) -> None:
    """Initialise head ``h`` of the first layer to attend ``h + 1`` tokens back, by its biases.

    RoPE rotates a constant key and a constant query by their positions. If the query bias is
    rotated back by ``d`` positions, the query has the same phase as the key ``d`` tokens earlier.

    Args:
        model: A model with random initial weights; changed in place.
    """
    attention = model.model.layers[0].self_attn
    head_dim: int = attention.head_dim
    half = head_dim // 2  # transformers rotates dimension i together with dimension i + half
    frequencies = model.model.rotary_emb.inv_freq[:_NUM_PAIRS]
    keys = _by_head(attention.k_proj, head_dim)
    queries = _by_head(attention.q_proj, head_dim)
    keys[:, :_NUM_PAIRS] = _BIAS_SIZE
    for head in range(queries.shape[0]):
        angle = frequencies * (head + 1)
        queries[head, :_NUM_PAIRS] = _BIAS_SIZE * angle.cos()
        queries[head, half : half + _NUM_PAIRS] = -_BIAS_SIZE * angle.sin()


def _by_head(projection: nn.Linear, head_dim: int) -> torch.Tensor:
    """The bias of a projection as ``[H, D]``, a view."""
    assert projection.bias is not None
    return projection.bias.reshape(-1, head_dim)


def export_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, configuration and tokenizer; existing files are replaced atomically.

    Args:
        model: The model; its parameters are stored in bfloat16.
        tokenizer: Its tokenizer.
        folder: Output folder; created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        with no_progress_bars():
            model.bfloat16().save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for file in Path(partial).iterdir():
            os.replace(file, folder / file.name)
