"""Small model folders in the format of transformers."""

from pathlib import Path

import torch
from tiny import tiny_model

NUM_LAYERS = 2


def save_tiny_model(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model with the reasoner's tokenizer, without its chat template."""
    from kvpolicy_reasoner.tokenizer import build_tokenizer  # not installed everywhere

    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    model = tiny_model(
        "qwen2",
        dtype=dtype,
        num_layers=NUM_LAYERS,
        vocab=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
