"""A package that is installed during a test: its entry points and its modules."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: Name of the package; entry points by group and name; texts of its modules by name.
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package: entry points by group and name, and modules by name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(package: str, points: dict[str, dict[str, str]], **modules: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = []
        for group, named in points.items():
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in named.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)

    yield install
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]
