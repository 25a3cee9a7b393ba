"""Wheels in a folder that pip finds without a network."""

import hashlib
import zipfile
from pathlib import Path

import pytest


def write_wheel(folder: Path, project: str, members: dict[str, bytes]) -> tuple[str, int]:
    """Write version 1.0 of a project, which needs another one that is nowhere.

    Args:
        folder: Where to.
        project: A name without separators.
        members: Its files.

    Returns:
        Its SHA-256 and its size.
    """
    info = f"{project}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\nRequires-Dist: nowhere\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{project}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size


def only_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find wheels in a folder and nowhere else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
