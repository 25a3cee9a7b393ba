"""Loading a model and its tokenizer: hub ids and local folders by the same door."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvpolicy.errors import ModelError

DTYPES: dict[str, str | torch.dtype] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """Load a decoder-only model and its tokenizer, ready to generate.

    Args:
        name: Hub id, or a local folder with weights as safetensors.
        dtype: ``"auto"`` (as stored), ``"float32"``, ``"bfloat16"``, ``"float16"``, or a torch
            dtype.
        device: Where to put it; ``None`` means CUDA if there is any, else the CPU.
        trust_remote_code: Whether to run code that comes with the model.

    Returns:
        The model and its tokenizer.

    Raises:
        ModelError: If either cannot be loaded.
    """
    wanted = as_dtype(dtype)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    remote = {"trust_remote_code": trust_remote_code}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=wanted, use_safetensors=True, **remote
        )
        tokenizer = AutoTokenizer.from_pretrained(name, **remote)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _cannot_load(name, error) from error
    return move(model.eval(), where), tokenizer


def move(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Put a model on a device; raises `ModelError` if it cannot be."""
    try:
        model.to(device)  # type: ignore[arg-type] # transformers wraps it and loses its self
    except (RuntimeError, AssertionError) as error:
        msg = f"the model cannot be put on device '{device}': {_first_line(error)}"
        raise ModelError(msg) from error
    return model


def load_config(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load a model's configuration only; raises `ModelError` if it cannot be."""
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _cannot_load(name, error) from error


def as_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype by its name, ``"auto"`` as it is; raises `ModelError` for other names."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        msg = f"dtype '{dtype}' is unknown; choose one of {', '.join(DTYPES)}"
        raise ModelError(msg)
    return DTYPES[dtype]


def _cannot_load(name: str | Path, error: BaseException) -> ModelError:
    msg = (
        f"model '{name}' cannot be loaded: {_first_line(error)} Give a hub id or a folder with "
        "config.json, safetensors weights and a tokenizer"
    )
    return ModelError(msg)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    line = lines[0].strip() if lines else type(error).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."
