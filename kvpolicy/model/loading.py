"""Loading a model and its tokenizer: hub ids and local folders by the same door."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvpolicy.errors import ModelError, error_summary
from kvpolicy.model.tensor_parallel import TpPlan, loading_options

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
    tp_plan: TpPlan | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Load a decoder-only model and its tokenizer, ready to generate.

    Args:
        name: Hub id, or a local folder with weights as safetensors.
        dtype: ``"auto"`` (as stored), ``"float32"``, ``"bfloat16"``, ``"float16"``, or a torch
            dtype.
        device: Where to put it; ``None`` means CUDA if there is any, else the CPU.
        trust_remote_code: Whether to run code that comes with the model.
        tp_plan: Splits the model over the processes that torchrun has started, each of which
            calls this: ``"auto"``, as transformers plans it for models of its kind, or a style
            for each of some modules. Each process has a device of its own then.

    Returns:
        The model and its tokenizer.

    Raises:
        ModelError: If either cannot be loaded, or the model cannot be split.
    """
    wanted = as_dtype(dtype)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    remote = {"trust_remote_code": trust_remote_code}
    options: dict[str, Any] = {}
    if tp_plan is not None:
        if device is not None:
            msg = (
                f"model '{name}' is to be split over processes, and device '{device}' was given; "
                "each process takes a device of its own, leave it out"
            )
            raise ModelError(msg)
        config = load_config(name, trust_remote_code=trust_remote_code)
        options = loading_options(name, config, tp_plan)
    try:
        # Weights that do not fit are told apart below: transformers would print a table of
        # them, or fill in random numbers.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=wanted,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **remote,
            **options,
        )
        model, found = loaded
        tokenizer = AutoTokenizer.from_pretrained(name, **remote)
    except Exception as error:
        raise _cannot_load(name, _pickled(name) or _said(error)) from error
    problem = _weights_problem(found) or _tokenizer_problem(tokenizer)
    if problem is not None:
        raise _cannot_load(name, problem)
    return model.eval() if options else move(model.eval(), where), tokenizer


def move(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Put a model on a device; raises `ModelError` if it cannot be."""
    try:
        model.to(device)  # type: ignore[arg-type] # transformers wraps it and loses its self
    except (RuntimeError, AssertionError) as error:
        msg = f"the model cannot be put on device '{device}': {_said(error)}"
        raise ModelError(msg) from error
    return model


def load_config(name: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load a model's configuration only; raises `ModelError` if it cannot be."""
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _cannot_load(name, _said(error)) from error


def as_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype by its name, ``"auto"`` as it is; raises `ModelError` for other names."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        msg = f"dtype '{dtype}' is unknown; choose one of {', '.join(DTYPES)}"
        raise ModelError(msg)
    return DTYPES[dtype]


def _weights_problem(found: Mapping[str, Any]) -> str | None:
    """What transformers would have filled with random numbers."""
    for kind, words in (("mismatched_keys", "of another shape"), ("missing_keys", "missing")):
        names = sorted(str(one[0] if isinstance(one, tuple) else one) for one in found[kind])
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return f"weights are {words}: {names[0]}{more}."
    return None


def _tokenizer_problem(tokenizer: Any) -> str | None:
    """Where its files are missing, transformers may build a tokenizer that knows no token."""
    if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        return None
    return "its tokenizer knows no tokens; tokenizer.json may be missing."


def _pickled(name: str | Path) -> str | None:
    """Why a folder cannot be loaded that has its weights as a pickle only."""
    folder = Path(name)
    if not folder.is_dir() or list(folder.glob("*.safetensors")):
        return None
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if not pickles:
        return None
    return (
        f"its weights are a pickle ({pickles[0]}), which is refused, because reading one may "
        "run code; convert them to safetensors where you trust them."
    )


def _cannot_load(name: str | Path, reason: str) -> ModelError:
    msg = (
        f"model '{name}' cannot be loaded: {reason} Give a hub id or a folder with "
        "config.json, safetensors weights and a tokenizer"
    )
    return ModelError(msg)


def _said(error: BaseException) -> str:
    """What another library says, as one sentence: its first, or all if that promises more."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    known = isinstance(error, (OSError, ValueError)) and lines
    line = lines[0] if known else error_summary(error)
    if line.endswith(":"):
        line = " ".join(lines)
    return line if line.endswith((".", "!", "?")) else f"{line}."
