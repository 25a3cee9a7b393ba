"""Models in GGUF files: read once by transformers, and kept as a folder of safetensors.

transformers dequantises every weight to float32, which takes minutes for a large model. What it
read is kept in the user's cache folder by the hash of the file and the release that read it. It
ignores what it does not know, such as factors of rotary embeddings, so what a file holds and a
model of transformers does not is looked for here, and refused.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.compat import dequantising
from kvpolicy.errors import ModelError
from kvpolicy.extras import install_extra
from kvpolicy.files import open_binary, read_json
from kvpolicy.model.libraries import cannot_load, first_sentence, quiet_libraries
from kvpolicy.model.user_cache import built_once, cache_folder, size_of

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@attrs.frozen
class KeptGguf:
    """What was read of a GGUF file, and is kept.

    Attributes:
        file: Name of the file.
        sha256: Its hash, in hexadecimal digits.
        folder: The folder with what was read.
        num_bytes: Size of the folder.
    """

    file: str
    sha256: str
    folder: Path
    num_bytes: int


def readable_folder(folder: Path, name: str | Path) -> Path:
    """A folder that transformers reads: the one given, or what was read of its GGUF file.

    Args:
        folder: A folder with safetensors weights, a GGUF file, or neither.
        name: What the user named.

    Raises:
        ModelError: It has several GGUF files, or one that cannot be read.
    """
    found = [] if any(folder.glob("*.safetensors")) else gguf_in(folder)
    if len(found) > 1:
        files = ", ".join(path.name for path in found)
        raise cannot_load(name, f"it has several GGUF files: {files}; name one of them")
    return read_gguf(found[0], name) if found else folder


def kept_gguf() -> list[KeptGguf]:
    """What is kept of GGUF files, by the file's name; nothing is read from them.

    Raises:
        ModelError: A configuration cannot be read.
    """
    found = []
    for folder in (cache_folder() / "gguf").glob("[0-9a-f]*"):
        config = read_json(folder / "config.json", f"{folder}/config.json", error=ModelError)
        file, sha256 = config["gguf_file"], config["gguf_sha256"]
        found.append(KeptGguf(file, sha256, folder, size_of(folder)))
    return sorted(found, key=lambda one: (one.file, str(one.folder)))


def gguf_in(folder: Path) -> list[Path]:
    """The GGUF files of a folder."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def kept_of(path: Path) -> list[KeptGguf]:
    """What is kept of one GGUF file, by whatever release it was read.

    Args:
        path: The file.

    Raises:
        ModelError: The file cannot be read.
    """
    digest = _hash(path, path)
    return [one for one in kept_gguf() if one.sha256 == digest]


def check_reader(name: str | Path) -> None:
    """Check that what reads GGUF files is installed.

    Args:
        name: What the user named.

    Raises:
        ModelError: It is not.
    """
    missing = [one for one in ("gguf", "accelerate") if find_spec(one) is None]
    if missing:
        raise cannot_load(
            name,
            f"GGUF files are read with the package {missing[0]}, which is not installed: "
            f"{install_extra('gguf')}",
        )


def read_gguf(path: Path, name: str | Path) -> Path:
    """The folder with what was read of a GGUF file; it is read if it was not before.

    Args:
        path: The file.
        name: What the user named.

    Returns:
        A folder of transformers, whose configuration says which file it is of.

    Raises:
        ModelError: The file cannot be read, or not without loss, or what was read not be kept.
    """
    digest = _hash(path, name)
    target = cache_folder() / "gguf" / f"{digest}-transformers-{version('transformers')}"
    what = f"what was read of model '{name}'"
    return built_once(target, what, lambda folder: _convert(path, name, digest, folder))


def _hash(path: Path, name: str | Path) -> str:
    """The hash of a file that seems to be GGUF, and all of a model."""
    if part := _PART.search(path.name):
        number, count = map(int, part.groups())
        reason = (
            f"it is part {number} of {count}, and transformers reads GGUF in one file; join them "
            "by `llama-gguf-split --merge`"
        )
        raise cannot_load(name, reason)
    with open_binary(path, f"model '{name}'", error=ModelError) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise cannot_load(name, f"{path.name} is no GGUF file; download it again")
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _convert(path: Path, name: str | Path, digest: str, folder: Path) -> None:
    check_reader(name)
    import torch
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
    )

    metadata, num_weights = _contents(path, name)
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.absolute().parent),
        "gguf_file": path.name,
    }
    architecture = metadata.get("general.architecture")
    no_decoder = (
        f"its architecture '{architecture}' is none that transformers {version('transformers')} "
        "reads from GGUF as a decoder; take the model's folder of safetensors"
    )
    with quiet_libraries(), _quiet_bars():
        with _refusing(name, no_decoder):
            config = AutoConfig.from_pretrained(**source)
            if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
                raise ValueError
        with _refusing(name, "its tokenizer cannot be read: {}"):
            tokenizer = AutoTokenizer.from_pretrained(**source)
        with _refusing(name, "{}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, output_loading_info=True, **dequantising()
            )
    model, info = loaded
    _check_complete(name, model, info, metadata, num_weights)
    model.config.gguf_file, model.config.gguf_sha256 = path.name, digest
    # The weights are plain now, and `save_pretrained` refuses those that claim to be quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with quiet_libraries(), _quiet_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _contents(path: Path, name: str | Path) -> tuple[dict[str, Any], int]:
    """The single values of a file's metadata, and the number of its weights.

    Raises:
        ModelError: It is damaged, or has weights that cannot be dequantised.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # of whatever a damaged file makes it read
        unknown = re.search(r"(\d+) is not a valid GGMLQuantizationType", str(error))
        reason = f"{path.name} is cut or damaged ({first_sentence(error)[:-1]}); download it again"
        if unknown is not None:
            reason = (
                f"its quantisation, number {unknown[1]} of GGML, is unknown to the installed gguf; "
                "a newer gguf may know it, or take a file of Q8_0, Q4_K_M or F16"
            )
        raise cannot_load(name, reason) from error
    for kind, tensor in {one.tensor_type: one for one in reader.tensors}.items():
        try:
            gguf.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], kind)
        except Exception as error:
            reason = (
                f"its quantisation {kind.name} cannot be read by the installed gguf; take a file "
                "of Q8_0, Q4_K_M or F16"
            )
            raise cannot_load(name, reason) from error
    single = {key: field.contents() for key, field in reader.fields.items() if len(field.data) == 1}
    return single, sum(int(tensor.n_elements) for tensor in reader.tensors)


@contextmanager
def _refusing(name: str | Path, reason: str) -> Iterator[None]:
    """Answer what transformers raises by a reason, which may quote it: ``{}``."""
    try:
        yield
    except Exception as error:
        raise cannot_load(name, reason.format(first_sentence(error))) from error


def _check_complete(
    name: str | Path, model: Any, info: Any, metadata: dict[str, Any], num_weights: int
) -> None:
    """Check that all of a file is in the model, and all of the model in the file.

    Raises:
        ModelError: Something is missing.
    """
    reason = None
    missing = sorted(map(str, info["missing_keys"]))
    num_read = sum(weight.numel() for weight in model.parameters())
    scaling = next(
        (value for key, value in metadata.items() if key.endswith(".rope.scaling.type")), "none"
    )
    rope = getattr(model.config, "rope_parameters", None) or {}
    types = [one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)]
    if missing:
        reason = f"it lacks weights: {missing[0]}"
    elif scaling not in ("none", *types):
        reason = f"its rotary embeddings are scaled ({scaling})"
    elif num_read != num_weights:
        reason = f"it has {num_weights:,} weights"
        reason += f", of which a {type(model).__name__} has {num_read:,}"
    if reason is not None:
        reason += (
            f", and transformers {version('transformers')} does not read that from GGUF; take the "
            "model's folder of safetensors"
        )
        raise cannot_load(name, reason)


@contextmanager
def _quiet_bars() -> Iterator[None]:
    """Leave out progress bars that have no switch where nobody looks: those of reading, writing."""
    if sys.stderr.isatty():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stderr(nothing):
        yield
