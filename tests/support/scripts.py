"""Scripts of the docs, which are no packages, as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

_DOCS = Path(__file__).parents[2] / "docs"


def load_script(name: str) -> ModuleType:
    """Run a file of ``docs``, such as ``"benchmarks/related.py"``, and return it as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, _DOCS / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
