"""Models by the names a user types: the bundled reasoners, hub ids, local folders."""

import difflib
import os
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicy_reasoner.bundled import BUNDLED, bundled_path

from kvpolicy.errors import ModelError, error_summary
from kvpolicy.lab.hub import hub_can_be_reached

if TYPE_CHECKING:
    from kvpolicy.model.tensor_parallel import TpPlan


def open_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    tp_plan: "TpPlan | None" = None,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        name: A name in `BUNDLED`, a hub id or a local folder.
        dtype: As in `kvpolicy.model.loading.load_model`; the reasoners are in float32 unless told
            otherwise, since they are stored in half precision to be small, not to be run in it.
        device: Where to put it; CUDA if there is any, else the CPU, if not given.
        trust_remote_code: Whether to run code that comes with the model.
        tp_plan: How to split it over processes, as in `kvpolicy.model.loading.load_model`.

    Returns:
        The model and its tokenizer.

    Raises:
        ModelError: It cannot be loaded, or is to be loaded whole by each of several processes
            that torchrun has started.
    """
    if tp_plan is None and _started_by_torchrun():
        msg = (
            "torchrun has started several processes, each of which would do all the work; only "
            "'kvpolicy run --tensor-parallel' shares a model among them, start one for the rest"
        )
        raise ModelError(msg)
    path = _path(name)
    from kvpolicy.model.loading import load_model

    with _Quiet():
        try:
            return load_model(
                path,
                dtype=_dtype(name, dtype),
                device=device,
                trust_remote_code=trust_remote_code,
                tp_plan=tp_plan,
            )
        except ModelError as error:
            raise _with_hint(error, name) from error


def open_skeleton(name: str, *, dtype: str = "auto", trust_remote_code: bool = False) -> Any:
    """Build a model from its configuration, without weights and without memory for them.

    Args:
        name: A name in `BUNDLED`, a hub id or a local folder.
        dtype: Precision, as in `open_model`.
        trust_remote_code: Whether to run code that comes with the model.

    Returns:
        The model on the device ``meta``.

    Raises:
        ModelError: It cannot be built.
    """
    path = _path(name)
    import torch
    from transformers import AutoModelForCausalLM

    from kvpolicy.model.loading import as_dtype, load_config

    wanted = as_dtype(_dtype(name, dtype))
    with _Quiet():
        try:
            config = load_config(path, trust_remote_code=trust_remote_code)
        except ModelError as error:
            raise _with_hint(error, name) from error
        wanted = (config.dtype or torch.float32) if wanted == "auto" else wanted
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(
                    config, dtype=wanted, trust_remote_code=trust_remote_code
                )
        except Exception as error:
            msg = (
                f"model '{name}' is not a decoder-only model that transformers can build: "
                f"{error_summary(error)}"
            )
            raise ModelError(msg) from error


def _dtype(name: str, dtype: str) -> str:
    return "float32" if name in BUNDLED and dtype == "auto" else dtype


def _started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


class _Quiet:
    """Keep progress bars, retries and advice of the libraries out of our output."""

    def __enter__(self) -> None:
        from huggingface_hub.utils import logging as hub
        from transformers.utils import logging

        self._bars, self._level = logging.is_progress_bar_enabled(), logging.get_verbosity()
        self._hub_level = hub.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity(ERROR)
        hub.set_verbosity(ERROR)

    def __exit__(self, *_: object) -> None:
        from huggingface_hub.utils import logging as hub
        from transformers.utils import logging

        hub.set_verbosity(self._hub_level)
        logging.set_verbosity(self._level)
        if self._bars:
            logging.enable_progress_bar()


def _path(name: str) -> str:
    if Path(name).is_dir() and name:
        return name
    if name in BUNDLED:
        return str(bundled_path(name))
    # A hub id is NAME or OWNER/NAME. What cannot be one, or is a slip of the pen, need not be
    # asked for on the network.
    is_path = len(Path(name).parts) > 2 or name.startswith(("/", ".", "~")) or not name.strip()
    hint = _hint(name)
    if is_path or (hint and "/" not in name):
        msg = f"model '{name}' is no folder, and not a name of ours.{hint}"
        raise ModelError(msg)
    if not _may_be_had(name):
        msg = (
            f"model '{name}' is no folder and has not been downloaded before, and the hub "
            "cannot be reached from here; give 'reasoner' or a local folder."
        )
        raise ModelError(msg)
    return name


def _may_be_had(name: str) -> bool:
    """Whether a hub id is in the cache, or the hub can be asked."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if constants.HF_HUB_OFFLINE or try_to_load_from_cache(name, "config.json") is not None:
            return True
    except HFValidationError:
        return True  # transformers has a good message for it
    return hub_can_be_reached()


def _with_hint(error: ModelError, name: str) -> ModelError:
    hint = _hint(name)
    return ModelError(f"{str(error).rstrip('.')}.{hint}") if hint else error


def _hint(name: str) -> str:
    folder = Path(name).parent
    siblings = [str(p) for p in sorted(folder.iterdir()) if p.is_dir()] if folder.is_dir() else []
    known = [one for one in [*BUNDLED, *siblings] if one != name.rstrip("/")]
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    return f" Did you mean {' or '.join(near)}?" if near else ""
