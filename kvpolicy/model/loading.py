"""Loading a model and its tokenizer: by an installed name, hub id, folder or GGUF file."""

import difflib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import safetensors
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    ProcessorMixin,
)

from kvpolicy.entry_points import default_name
from kvpolicy.errors import ModelError
from kvpolicy.extras import install_extra
from kvpolicy.files import read_json
from kvpolicy.model.gguf import SUFFIX, read_gguf, readable_folder
from kvpolicy.model.hub import hub_reachable
from kvpolicy.model.installed import installed_models, model_folder, registered_model
from kvpolicy.model.libraries import cannot_load, first_sentence, quiet_libraries
from kvpolicy.model.lora import base_of, is_adapter, merge_adapter
from kvpolicy.model.packed import packed_model, wants_packing
from kvpolicy.model.tensor_parallel import TpPlan, loading_options
from kvpolicy.model.weight_forms import CpuWeights

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
    cpu_weights: CpuWeights = "plain",
) -> tuple[PreTrainedModel, Any]:
    """Load a decoder-only model and its tokenizer, ready to generate.

    Args:
        name: Name of an installed model, hub id, local folder with safetensors weights, or GGUF
            file: its path, a folder with one, or ``HUB_ID:FILE.gguf``. What was read of a GGUF
            file is kept in the user's cache folder. A folder with a LoRA adapter of PEFT gives
            the model that it names with the adapter merged into it, and the adapter's tokenizer
            if it has one.
        dtype: ``"auto"`` (as stored, or as an installed model prefers), ``"float32"``,
            ``"bfloat16"``, ``"float16"``, or a torch dtype.
        device: Where to put it; by default CUDA if available, else the CPU.
        trust_remote_code: Whether to run code that comes with the model.
        tp_plan: Splits the model over the processes that torchrun has started, each of which
            calls this: ``"auto"`` for the model's own plan, or a style for each of some modules.
            Each process takes a device of its own.
        cpu_weights: ``"packed"``, ``"bf16"`` or ``"int8"`` gives the `kvpolicy.packed_model` of
            the model in this form, with its plain weights released.

    Returns:
        The model and its tokenizer.

    Raises:
        ModelError: The model or its tokenizer cannot be loaded, or the model cannot be split or
            packed.
    """
    packing = wants_packing(cpu_weights)
    found = _find(name, dtype)
    source, wanted = found.source, found.dtype
    if _is(Path.is_dir, source):
        _check_weights(name, Path(source))
    remote = {"trust_remote_code": trust_remote_code}
    options: dict[str, Any] = {}
    if tp_plan is not None:
        if device is not None:
            msg = (
                f"model '{name}' is to be split over processes, and device '{device}' was given; "
                "each process takes a device of its own, leave it out"
            )
            raise ModelError(msg)
        if found.adapter is not None:
            reason = (
                "it is an adapter, and is merged into whole weights; save the model that "
                "`load_model` gives, and split that."
            )
            raise cannot_load(name, reason)
        options = loading_options(name, _load_config(name, source, trust_remote_code), tp_plan)
    with quiet_libraries():
        try:
            # Weights that do not fit are reported below; transformers would print a table of
            # them, or replace them by random numbers.
            loaded: Any = _class_for(source, trust_remote_code).from_pretrained(
                source,
                dtype=wanted,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **remote,
                **options,
            )
            model, info = loaded
            tokenizer = AutoTokenizer.from_pretrained(found.tokenizer, **remote)
        except Exception as error:
            _check_generation_config(name, source)  # it may be the reason
            _check_files(name, source)
            reason = first_sentence(error)
            if found.adapter is not None:
                reason = f"it is an adapter of {source}; {reason}"
            raise _cannot_load(name, reason) from error
    _check_generation_config(name, source)
    problem = _weights_problem(info) or _tokenizer_problem(tokenizer)
    if problem is not None:
        raise _cannot_load(name, problem)
    if found.adapter is not None:
        merge_adapter(model, found.adapter, name)
    model = model.eval()
    if tp_plan is None:
        model = move(model, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if packing:
        model = packed_model(model, cpu_weights=cpu_weights, release=True)
    return model, tokenizer


def load_processor(name: str | Path, *, trust_remote_code: bool = False) -> ProcessorMixin:
    """Load what prepares images and texts for a model.

    Args:
        name: As for `load_model`.
        trust_remote_code: Whether to run code that comes with the model.

    Returns:
        The processor, which has a tokenizer of its own.

    Raises:
        ModelError: The model has none for images, or it cannot be loaded.
    """
    from transformers import AutoProcessor  # with the code that reads images

    source = _find(name, "auto").tokenizer
    with quiet_libraries():
        try:
            processor = AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
        except Exception as error:
            reason = first_sentence(error).partition(". ")[0].removesuffix(".")
            if "torchvision" in reason.lower():
                reason = f"it needs torchvision; run `{install_extra('images')}`"
            msg = f"the processor of model '{name}' cannot be loaded: {reason}"
            raise ModelError(msg) from error
    # Where a folder has none, transformers gives the tokenizer.
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        msg = (
            f"model '{name}' has no processor that prepares images; add preprocessor_config.json "
            "and processor_config.json to its folder"
        )
        raise ModelError(msg)
    return processor


def load_skeleton(
    name: str | Path, *, dtype: str | torch.dtype = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model from its configuration, without weights and without memory for them.

    Args:
        name: As for `load_model`.
        dtype: As for `load_model`.
        trust_remote_code: Whether to run code that comes with the model.

    Returns:
        The model on the device ``meta``.

    Raises:
        ModelError: The model cannot be built.
    """
    found = _find(name, dtype)
    wanted = found.dtype
    config = _load_config(name, found.source, trust_remote_code)
    with quiet_libraries():
        try:
            with torch.device("meta"):
                model: PreTrainedModel = _class_of(config).from_config(
                    config,
                    dtype=(config.dtype or torch.float32) if wanted == "auto" else wanted,
                    trust_remote_code=trust_remote_code,
                )
        except Exception as error:
            msg = (
                f"model '{name}' is not a decoder-only model that transformers can build: "
                f"{first_sentence(error)}"
            )
            raise ModelError(msg) from error
    return model


def move(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Move a model to a device.

    Raises:
        ModelError: There is no such device, or it lacks memory.
    """
    try:
        model.to(device)  # type: ignore[arg-type] # transformers wraps it and loses its self
    except (RuntimeError, AssertionError) as error:
        msg = f"the model cannot be put on device '{device}': {first_sentence(error)}"
        raise ModelError(msg) from error
    return model


def as_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype by its name; ``"auto"`` stays as it is.

    Raises:
        ModelError: The name is unknown.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str) or dtype not in DTYPES:
        msg = f"dtype '{dtype}' is unknown; choose one of {', '.join(DTYPES)}"
        raise ModelError(msg)
    return DTYPES[dtype]


@attrs.frozen
class _Found:
    """What transformers is given for a model.

    Attributes:
        source: A folder or a hub id.
        dtype: The precision.
        adapter: The folder of an adapter that is merged into the model.
    """

    source: str
    dtype: str | torch.dtype
    adapter: Path | None = None

    @property
    def tokenizer(self) -> str:
        """The folder or hub id of the tokenizer."""
        own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
        return str(self.adapter) if own else self.source


def _find(name: str | Path, dtype: str | torch.dtype, *, of_adapter: bool = False) -> _Found:
    """What transformers is given for a model, or for that of an adapter.

    Asks the network only for names that may be a hub id.
    """
    text, wanted = str(name), as_dtype(dtype)
    if text and _is(Path.is_dir, text):
        return _folder(name, Path(text), wanted, of_adapter)
    if text in installed_models():
        model = registered_model(text)
        wanted = as_dtype(model.dtype) if dtype == "auto" else wanted
        return _folder(name, model_folder(text, model), wanted, of_adapter)
    if _is(Path.is_file, text):
        if text.endswith(SUFFIX):
            return _Found(str(read_gguf(Path(text), name)), wanted)
        msg = (
            f"model '{text}' is a file, and no GGUF file; give a folder with config.json, "
            "safetensors weights and a tokenizer"
        )
        raise ModelError(msg)
    # A hub id is NAME or OWNER/NAME. A path or a misspelt name is refused without asking the hub.
    hub_id, colon, file = text.partition(":") if text.endswith(SUFFIX) else (text, "", "")
    is_path = len(Path(hub_id).parts) > 2 or text.startswith(("/", ".", "~")) or not text.strip()
    hint = _hint(text)
    if is_path or (text.endswith(SUFFIX) and not colon) or (hint and "/" not in text):
        what = "file" if text.endswith(SUFFIX) else "folder"
        msg = f"model '{text}' is no {what} and no installed model.{hint}"
        raise ModelError(msg)
    if not _is_available(hub_id, file or "config.json"):
        default = default_name("model")
        others = "" if default is None else f"'{default}', "
        msg = (
            f"model '{text}' is no folder and not in the download cache, and the hub cannot be "
            f"reached from here; give {others}a local folder or a downloaded model."
        )
        raise ModelError(msg)
    source = str(read_gguf(_downloaded(name, hub_id, file), name)) if file else text
    return _Found(source, wanted)


def _folder(name: str | Path, folder: Path, dtype: str | torch.dtype, of_adapter: bool) -> _Found:
    """What transformers is given for a folder that a user or a package names."""
    if is_adapter(folder):
        if of_adapter:
            raise cannot_load(name, "it is an adapter itself.")
        base = base_of(folder, name)
        try:
            return attrs.evolve(_find(base, dtype, of_adapter=True), adapter=folder)
        except ModelError as error:
            raise cannot_load(name, f"it is an adapter of '{base}'; {error}") from error
    readable = readable_folder(folder, name)
    _check_folder(name, readable)
    return _Found(str(readable), dtype)


def _downloaded(name: str | Path, hub_id: str, file: str) -> Path:
    """A file of the hub, downloaded if it was not before."""
    from huggingface_hub import hf_hub_download

    with quiet_libraries():
        try:
            return Path(hf_hub_download(hub_id, file))
        except Exception as error:
            raise _cannot_load(name, first_sentence(error)) from error


def _is(kind: Callable[[Path], bool], text: str) -> bool:
    """Whether a path is a file or folder; one that no file can have is neither."""
    try:
        return kind(Path(text))
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def _is_available(hub_id: str, file: str) -> bool:
    """Whether a file of a hub id is in the download cache, or the hub can be reached."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = try_to_load_from_cache(hub_id, file) is not None
    except (HFValidationError, OSError):  # also of a name too long for a file
        return True  # transformers' own message explains it
    return constants.HF_HUB_OFFLINE or is_cached or hub_reachable()


def _class_for(source: str, trust_remote_code: bool) -> Any:
    """What builds a model of a folder or a hub id: text from text, or else from images, too."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception:  # loading the model says what is wrong
        return AutoModelForCausalLM
    return _class_of(config)


def _class_of(config: Any) -> Any:
    """What builds a model of a configuration."""
    comes_with_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if comes_with_code or type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    if type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _load_config(name: str | Path, source: str, trust_remote_code: bool) -> Any:
    with quiet_libraries():
        try:
            return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise _cannot_load(name, first_sentence(error)) from error


def _check_generation_config(name: str | Path, source: str) -> None:
    """Check the file that says where a generation ends; one that is no JSON is passed over.

    Raises:
        ModelError: It cannot be read, or holds no object.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    file = "generation_config.json"
    found: object = str(Path(source) / file)
    if not _is(Path.is_dir, source):
        with suppress(HFValidationError, OSError):  # of names that the hub cannot have
            found = try_to_load_from_cache(source, file)
    if not isinstance(found, str) or not _is(Path.is_file, found):
        return
    if not isinstance(read_json(Path(found), f"{file} of model '{name}'", error=ModelError), dict):
        msg = f"{file} of model '{name}' holds no object; download the file again"
        raise ModelError(msg)


def _weights_problem(info: Mapping[str, Any]) -> str | None:
    """Report weights that transformers would have replaced by random numbers."""
    for kind, problem in (("mismatched_keys", "of another shape"), ("missing_keys", "missing")):
        names = sorted(str(one[0] if isinstance(one, tuple) else one) for one in info[kind])
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return f"weights are {problem}: {names[0]}{more}."
    return None


def _tokenizer_problem(tokenizer: Any) -> str | None:
    """Report an empty vocabulary: without its files, transformers may build such a tokenizer."""
    if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        return None
    return "its tokenizer knows no tokens; tokenizer.json may be missing."


def _check_folder(name: str | Path, folder: Path) -> None:
    """Check that a folder has the configuration of a model.

    Raises:
        ModelError: It has none, with what it has instead.
    """
    path = folder / "config.json"
    if path.is_file():
        try:
            found = read_json(path, "its config.json", error=ModelError)
        except ModelError as error:
            raise _cannot_load(name, f"{error}.") from error
        if isinstance(found, dict) and isinstance(found.get("model_type", ""), str):
            return  # transformers says what else is wrong
        reason = "its config.json does not describe a model."
    else:
        reason = "it has no config.json."
        inner = next((one.parent for one in sorted(folder.glob("*/config.json"))), None)
        if inner is not None:
            reason = f"it has no config.json, but {inner} has one."
    raise _cannot_load(name, reason)


def _check_weights(name: str | Path, folder: Path) -> None:
    """Check that a folder has safetensors weights.

    Raises:
        ModelError: It has none, or as a pickle only.
    """
    if any(folder.glob("*.safetensors")):
        return
    reason = "it has no weights, such as model.safetensors."
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        reason = (
            f"its weights are a pickle ({pickles[0]}), which is refused, because reading one may "
            "run code; convert them to safetensors where you trust them."
        )
    raise _cannot_load(name, reason)


def _check_files(name: str | Path, source: str) -> None:
    """Check files whose contents transformers names no file for.

    Raises:
        ModelError: One is not what its name says.
    """
    if _is(Path.is_dir, source):
        for path in sorted(Path(source).glob("*.safetensors")):
            if (problem := _safetensors_problem(path)) is not None:
                msg = f"model '{name}' cannot be loaded: its file {path.name} {problem}"
                raise ModelError(msg)


def _safetensors_problem(path: Path) -> str | None:
    """What a file is that is not, or not all of, safetensors; ``None``: nothing seems wrong."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
        with safetensors.safe_open(path, framework="pt"):
            return None
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except safetensors.SafetensorError as error:
        if not head:
            return "is empty; download it again"
        if head.startswith(b"version https://git-lfs"):
            return "is a pointer of Git LFS and no weights; fetch them by `git lfs pull`"
        if head.lstrip().startswith(b"<"):
            return "is a page of HTML and no weights; download it again"
        return f"is cut or damaged ({error}); download it again"


def _cannot_load(name: str | Path, reason: str) -> ModelError:
    hint = _hint(str(name))
    advice = (
        " Give a hub id, a GGUF file, or a folder with config.json, safetensors weights and a "
        f"tokenizer{'.' if hint else ''}{hint}"
    )
    return cannot_load(name, reason + advice)


def _hint(name: str) -> str:
    """Names like this one; of a folder that is there nobody meant another."""
    if _is(Path.is_dir, name):
        return ""
    folder = Path(name).parent
    siblings = []
    if _is(Path.is_dir, str(folder)):
        with suppress(OSError):
            siblings = [str(one) for one in sorted(folder.iterdir()) if one.is_dir()]
    near = difflib.get_close_matches(name, [*installed_models(), *siblings], n=2, cutoff=0.7)
    return f" Did you mean {' or '.join(near)}?" if near else ""
