"""Interpreters in which other engines are installed: modules of their names, written by a test."""

import sys
from pathlib import Path


def interpreter(folder: Path, modules: dict[str, str]) -> Path:
    """A Python that imports these modules.

    Args:
        folder: Where to write them; they are beside the interpreter.
        modules: Their sources, by dotted name.
    """
    for name, source in modules.items():
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    python = folder / "python"
    python.write_text(
        f"#!{sys.executable}\nimport runpy, sys\nsys.path.insert(0, {str(folder)!r})\n"
        "assert sys.argv[1] == '-I'\nsys.argv = sys.argv[2:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    python.chmod(0o755)
    return python
