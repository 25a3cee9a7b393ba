"""The weights that the second reasoner's training starts from: the first one's, and new words."""

import torch
from transformers import Qwen2ForCausalLM

from kvpolicy_reasoner.model import build_model, load_reasoner
from kvpolicy_reasoner.verbose.tokenizer import build_verbose_tokenizer

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
