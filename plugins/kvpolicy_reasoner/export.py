"""Write the reasoner as a Hugging Face folder."""

import os
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from kvpolicy_reasoner.model import no_progress_bars


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
