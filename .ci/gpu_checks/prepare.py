"""`.ci/gpu prepare`: what the machine with the GPU lacks, and what it is to find.

In ``.ci/gpu_files``: ``site``, packages that are found before those of the machine; the expected
tokens and rows, ``expected.json``; and ``prepared.json``, for which sources they were made.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Pure Python, and missing there: what kvpolicy imports, and tests on several cores.
CARRIED = ("cattrs", "pytest-xdist", "execnet")
# What no stage reads: more bytes than all else.
LEFT_OUT = ("kvpolicy_reasoner/weights/smollm2-reasoner/",)
MOST_BYTES = 20 << 20  # with the tree less than 64 MiB


def prepare(folder: Path, *, quick: bool) -> int:
    """Fill the folder anew; the status of the command."""
    shutil.rmtree(folder, ignore_errors=True)
    site = folder / "site"
    site.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as built:
        # In this environment, which has the build backend: nothing is downloaded.
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(built).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site, [one for one in packed.namelist() if is_carried(one)])
    for name in CARRIED:
        _copy_distribution(name, site)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    expect = [sys.executable, str(Path(__file__).with_name("expect.py")), str(folder)]
    subprocess.run([*expect, *["--quick"] * quick], cwd=ROOT, check=True, env=environment)
    about = {"sources": digest_of_sources(ROOT), "quick": quick}
    (folder / "prepared.json").write_text(json.dumps(about), encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    sys.stdout.write(f"{folder.relative_to(ROOT)} has {size / 2**20:.1f} MiB\n")
    if size > MOST_BYTES:
        sys.stderr.write(f"that is more than {MOST_BYTES >> 20} MiB\n")
    return int(size > MOST_BYTES)


def prepared_for(folder: Path) -> dict[str, Any] | None:
    """For which sources the folder was filled; ``None`` if it is not complete."""
    file = folder / "prepared.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def digest_of_sources(root: Path) -> str:
    """A hash of all files of the packages, and of what says which texts are expected."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    found = hashlib.sha256()
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    folders = [*map(root.joinpath, packages), root / ".ci" / "gpu_checks"]
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(str(file.relative_to(root)).encode() + b"\0")
                found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def is_carried(name: str) -> bool:
    """Whether a stage may read a file of the wheel."""
    return not name.startswith(LEFT_OUT)


def _copy_distribution(name: str, site: Path) -> None:
    """Copy an installed distribution of pure Python, without scripts."""
    for file in importlib.metadata.files(name) or ():
        if file.suffix in (".so", ".pyd"):
            msg = f"{name} has compiled files, which another Python cannot use: {file}"
            raise RuntimeError(msg)
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), target)
